"""Rules about settings, declared once and spelled in the words of each user.

A rule names settings. `Facts` has their values for one user and the way that user writes them:
``model.fp8=e4m3`` in a configuration file, ``fp8='e4m3'`` in a program, ``--fp8-format e4m3`` on a
command line. Names are Megatron's; chunkgraph's own settings have the name of their field.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from chunkgraph.errors import ConfigError

_FIELD = re.compile(r"\{(\w+)(=?)(\w*)\}")
_ABSENT = "without "
_LITERALS = {"true": True, "false": False}
_PHRASES = {
    "ddp_at_once": "DistributedDataParallelConfig(delay_wgrad_compute=False)",
    "is_fully_sharded": "FSDP",
    "packed": "packed sequences",
}
"""Texts of facts that are not settings, the same for all users."""


@dataclass(frozen=True)
class Words:
    """The way a user writes settings.

    Attributes:
        name: returns the text of a setting's name.
        spell: returns the text of a setting with a value.
        verb: replaces the "=" of a setting that begins a sentence.
    """

    name: Callable[[str], str]
    spell: Callable[[str, Any], str]
    verb: str = "="


class Facts:
    """Settings as attributes; None for a setting that the user does not have.

    Args:
        values: returns the value of a setting by its name.
        words: the way the user writes settings.
    """

    def __init__(self, values: Callable[[str], Any], words: Words) -> None:
        self._values = values
        self._words = words

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._values(name)

    @property
    def verb(self) -> str:
        """Return the text between a setting and its value at the beginning of a sentence."""
        return self._words.verb

    def within(self, words: Words) -> Facts:
        """Return the same facts in other words."""
        return Facts(self._values, words)

    def name(self, name: str) -> str:
        """Return the text of a setting's name."""
        return _PHRASES.get(name) or self._words.name(name)

    def spell(self, name: str) -> str:
        """Return the text of a setting with its value; for ``name=``, of the name alone."""
        if name.endswith("=") or name in _PHRASES:
            return self.name(name.removesuffix("="))
        return self._words.spell(name, self._values(name))

    def text(self, template: str) -> str:
        """Replace the placeholders of a text by settings.

        ``{fp8}`` becomes the setting with its value, ``{fp8=}`` its name, and ``{fp8=e4m3}`` the
        setting with this value.
        """

        def replacement(match: re.Match[str]) -> str:
            name, equals, value = match.groups()
            if not value:
                return self.spell(f"{name}{equals}")
            literal = _LITERALS.get(value, int(value) if value.isdecimal() else value)
            return self._words.spell(name, literal)

        return _FIELD.sub(replacement, template)


@dataclass(frozen=True)
class Rule:
    """Settings that conflict, why, and what to do.

    Attributes:
        text: ``settings: why; what to do``. The settings are names for `Facts.spell`, separated by
            spaces; the rest is a template for `Facts.text`.
        when: returns a true value if the rule is broken; the values of a mapping replace further
            placeholders of the text. None: broken if all settings are on.
        error: the class of the error for a broken rule.
    """

    text: str
    when: Callable[[Facts], object] | None = None
    error: type[ConfigError] = ConfigError

    @property
    def settings(self) -> list[str]:
        """Return the names of the settings."""
        return self.text.partition(": ")[0].split()

    def broken(self, facts: Facts) -> object:
        """Return a true value if the rule is broken; see ``when``."""
        if self.when is not None:
            return self.when(facts)
        return all(getattr(facts, name.removesuffix("=")) for name in self.settings)

    def subject(self, facts: Facts) -> str:
        """Return the text of the rule's settings."""
        texts = [facts.spell(name) for name in self.settings]
        absent = [t.removeprefix(_ABSENT) for t in texts if t.startswith(_ABSENT)]
        first, *others = [t for t in texts if not t.startswith(_ABSENT)] or [""]
        parts = [first.replace("=", facts.verb, 1)]
        if others:
            parts.append(f"with {_listed(others, 'and')}")
        if absent:
            parts.append(f"{_ABSENT}{_listed(absent, 'or')}")
        return " ".join(parts).lstrip()

    def refusal(self, facts: Facts) -> str:
        """Return what breaks the rule, why, and what to do; ``""`` if the rule is kept."""
        broken = self.broken(facts)
        if not broken:
            return ""
        why = self.text.partition(": ")[2]
        for name, value in broken.items() if isinstance(broken, Mapping) else ():
            why = why.replace(f"{{{name}}}", str(value))
        return f"{self.subject(facts)}: {facts.text(why)}"


def _listed(texts: list[str], word: str) -> str:
    *most, last = texts
    return f"{', '.join(most)} {word} {last}" if most else last


def refusals(rules: Iterable[Rule], facts: Facts) -> list[str]:
    """Return the refusals of all broken rules."""
    return [text for rule in rules if (text := rule.refusal(facts))]


def check(rules: Iterable[Rule], facts: Facts, heading: str) -> None:
    """Check all rules, and raise one error with all refusals.

    Args:
        rules: the rules.
        facts: the settings to check.
        heading: the first line of a message with several refusals.

    Raises:
        ConfigError: a rule is broken; a subclass if a broken rule names one.
    """
    broken = {text: rule.error for rule in rules if (text := rule.refusal(facts))}
    if not broken:
        return
    error = next((kind for kind in broken.values() if kind is not ConfigError), ConfigError)
    texts = list(broken)
    raise error(f"{texts[0]}." if len(texts) == 1 else "\n  - ".join([heading, *texts]))


def recomputes(facts: Facts, *modules: str) -> bool:
    """Return whether the backward recomputes one of these parts of a layer."""
    how, parts = facts.recompute_granularity, facts.recompute_modules or ()
    return how == "full" or (how == "selective" and not set(modules).isdisjoint(parts))
