"""A rule about settings: declared once, and spoken in the words of whoever asks.

A rule names settings. `Facts` say what these are for one user, and how that user writes them:
``model.fp8=e4m3`` in a configuration file, ``fp8='e4m3'`` in a program, ``--fp8-format e4m3`` on a
command line. The names are Megatron's, or those of a section where the setting is chunkgraph's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from chunkgraph.errors import ConfigError

__all__ = ["Facts", "Rule", "Words", "check", "recomputes", "refusals"]

_FIELD = re.compile(r"\{(\w+)(=?)(\w*)\}")
_LITERALS = {"true": True, "false": False}
_PHRASES = {
    "ddp_at_once": "DistributedDataParallelConfig(delay_wgrad_compute=False)",
    "is_fully_sharded": "FSDP",
    "lengths_in_pipeline": "several lengths (buckets=...) in a pipeline",
    "lengths_of_experts": "several lengths (buckets=...) and experts on several ranks",
    "packed": "packed sequences",
}
"""Facts that are no settings, in any words."""


@dataclass(frozen=True)
class Words:
    """How a user writes settings.

    Attributes:
        name: Writes the name of a setting.
        spell: Writes a setting with a value.
        verb: Replaces the "=" of a setting that begins a sentence.
    """

    name: Callable[[str], str]
    spell: Callable[[str, Any], str]
    verb: str = "="


class Facts:
    """Settings as attributes, one name each; None is a setting that the user does not have.

    Args:
        values: Gets the value of a setting by its name.
        words: How the user writes it.
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
        """Stands between a setting and its value where they begin a sentence."""
        return self._words.verb

    def within(self, words: Words) -> Facts:
        """Return the same facts in other words."""
        return Facts(self._values, words)

    def name(self, name: str) -> str:
        """Write the name of a setting."""
        return _PHRASES.get(name) or self._words.name(name)

    def spell(self, name: str) -> str:
        """Write a setting with its value; ``name=`` writes its name alone."""
        if name.endswith("=") or name in _PHRASES:
            return self.name(name.removesuffix("="))
        return self._words.spell(name, self._values(name))

    def text(self, template: str) -> str:
        """Write the settings in a text.

        ``{fp8}`` stands for a setting with its value, ``{fp8=}`` for its name, and ``{fp8=e4m3}``
        for the setting with another value.
        """

        def written(match: re.Match[str]) -> str:
            name, equals, value = match.groups()
            if not value:
                return self.spell(f"{name}{equals}")
            literal = _LITERALS.get(value, int(value) if value.isdecimal() else value)
            return self._words.spell(name, literal)

        return _FIELD.sub(written, template)


@dataclass(frozen=True)
class Rule:
    """Settings that cannot go together, why, and what to do.

    Attributes:
        text: ``settings: why; what to do``. The settings are names as `Facts.spell` takes them, a
            space between two; the rest is a text as for `Facts.text`.
        when: True where the rule is broken; a mapping is true, and its values fill further fields
            of the text. Default: where all of the settings are on.
        error: Raised for a broken rule.
    """

    text: str
    when: Callable[[Facts], object] | None = None
    error: type[ConfigError] = ConfigError

    @property
    def settings(self) -> list[str]:
        """Names of the settings."""
        return self.text.partition(": ")[0].split()

    def broken(self, facts: Facts) -> object:
        """Return something true where the rule is broken."""
        if self.when is not None:
            return self.when(facts)
        return all(getattr(facts, name.removesuffix("=")) for name in self.settings)

    def subject(self, facts: Facts) -> str:
        """Write the settings that the rule is about."""
        first, *others = map(facts.spell, self.settings)
        first = first.replace("=", facts.verb, 1)
        if others:
            *most, last = others
            first += f" with {', '.join(most)} and {last}" if most else f" with {last}"
        return first.replace(" with without", " without")

    def refusal(self, facts: Facts) -> str:
        """Say what breaks the rule, why, and what to do; ``""`` where it is kept."""
        broken = self.broken(facts)
        if not broken:
            return ""
        why = self.text.partition(": ")[2]
        for name, value in broken.items() if isinstance(broken, Mapping) else ():
            why = why.replace(f"{{{name}}}", str(value))
        return f"{self.subject(facts)}: {facts.text(why)}"


def refusals(rules: Iterable[Rule], facts: Facts) -> list[str]:
    """List what breaks any of the rules."""
    return [text for rule in rules if (text := rule.refusal(facts))]


def check(rules: Iterable[Rule], facts: Facts, heading: str) -> None:
    """Check all rules together.

    Args:
        rules: The rules.
        facts: What they are about.
        heading: Stands above several refusals.

    Raises:
        ConfigError: Naming everything that breaks a rule; of a special kind if any rule has one.
    """
    broken = {text: rule.error for rule in rules if (text := rule.refusal(facts))}
    if not broken:
        return
    error = next((kind for kind in broken.values() if kind is not ConfigError), ConfigError)
    texts = list(broken)
    raise error(f"{texts[0]}." if len(texts) == 1 else "\n  - ".join([heading, *texts]))


def recomputes(facts: Facts, *modules: str) -> bool:
    """Return True where the backward recomputes one of these parts of a layer."""
    how, parts = facts.recompute_granularity, facts.recompute_modules or ()
    return how == "full" or (how == "selective" and not set(modules).isdisjoint(parts))
