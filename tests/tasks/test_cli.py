"""`farmhand tasks list` and `show`, as a person uses them."""

import json

from click.testing import CliRunner

from tasks.cli import cli


def test_list_names_the_sets_and_their_sizes() -> None:
    result = CliRunner().invoke(cli, ["list"])
    assert result.exit_code == 0
    assert "shell" in result.output
    assert "2,000" in result.output


def test_list_of_a_set_shows_its_families() -> None:
    result = CliRunner().invoke(cli, ["list", "shell"])
    assert result.exit_code == 0
    assert "find_and_move" in result.output


def test_show_prints_a_task_for_people_and_for_programs() -> None:
    plain = CliRunner().invoke(cli, ["show", "shell", "--split", "test", "--index", "2"])
    assert plain.exit_code == 0
    assert "shell/test/2" in plain.output
    assert "reward 1" in plain.output
    whole = CliRunner().invoke(cli, ["show", "shell", "--split", "test", "--index", "2", "--json"])
    assert json.loads(whole.output)["id"] == "shell/test/2"


def test_mistakes_are_one_line_and_exit_1() -> None:
    unknown = CliRunner().invoke(cli, ["show", "nope"])
    assert unknown.exit_code == 1
    assert "known: " in unknown.output
    past = CliRunner().invoke(cli, ["show", "shell", "--index", "100000000"])
    assert past.exit_code == 1
    assert "0 to 99999" in past.output
