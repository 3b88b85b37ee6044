"""Fixtures of the tests of ``chunkgraph plan``."""

from __future__ import annotations

import argparse

import pytest
from plan_config import CONFIG

from chunkgraph.cli import plan


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return str(path)


@pytest.fixture
def run(capsys):
    def call(*arguments):
        parser = argparse.ArgumentParser(prog="chunkgraph")
        plan.add_parser(parser.add_subparsers(dest="command", required=True))
        assert plan.run(parser.parse_args(["plan", *map(str, arguments)])) == 0
        return capsys.readouterr().out

    return call
