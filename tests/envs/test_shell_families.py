"""Every family of the set `shell` in real sandboxes: solved it scores 1, untouched 0, and cheated 0."""

import re
from collections.abc import Awaitable, Callable, Mapping

import pytest

from envs.base import Action, ToolCall
from envs.oracle import play_nothing, play_oracle
from envs.registry import make_environment
from sandbox.base import Sandbox
from tasks.base import Task
from tasks.shell import FAMILIES, load

NewSandbox = Callable[[], Awaitable[Sandbox]]

INSTANCES = 3


def swapped(pattern: str, by: str) -> Callable[[str], str]:
    """The oracle's commands with something else in a place that must be there."""

    def change(command: str) -> str:
        changed = re.sub(pattern, by, command)
        assert changed != command, (pattern, command)
        return changed

    return change


def target(content: str) -> Callable[[str], str]:
    """Something else than the answer in the answer's place, `$T`."""
    return lambda command: content.replace("$T", command.rpartition("> ")[2])


EMPTY = target("touch $T")
PIPE = target("mkfifo $T")
ENDLESS = target("ln -s /dev/zero $T")
MORE = swapped(r"$", r" && echo more >> $(ls -t | head -n 1)")
WHOLE = swapped(
    r"^(?:grep|grep -c|cut -d , -f \d|head -n \d|tail -n \d|sort -u|sort -n|sort -r|sort) (?:\w+ )?(\S+\.)", r"cat \1"
)
ONE_MORE = swapped(r"> (\S+)$", r"> tmp && echo $(($(cat tmp) + 1)) > \1")

CHEATS: Mapping[str, tuple[Callable[[str], str], ...]] = {
    "make_file": (EMPTY, PIPE, ENDLESS, swapped("echo ", "echo x"), swapped(r"> (\S+)", r"> real && ln -s real \1")),
    "count_lines": (EMPTY, PIPE, ENDLESS, ONE_MORE, swapped(" < ", " ")),
    "find_and_move": (
        swapped("mv ", "cp "),
        swapped(r"mv (\w+)/\S+", r"mv \1/*"),
        swapped("mv (.*) (.*)/", r"touch \2/x && rm \1"),
    ),
    "make_folders": (swapped("touch", "mkdir"), swapped("touch (.*)", r"echo x > \1"), swapped("&& touch.*", "")),
    "search": (EMPTY, PIPE, WHOLE, swapped("grep (.*) >", r"grep -v \1 >"), swapped("grep (.*) (.*) > (.*)", r"mv \2 \3")),
    "move_file": (
        swapped("mv ", "cp "),
        swapped(r"mv (\w+)/\S+ ", r"mv \1/* "),
        swapped("mv (.*) (.*)", r"rm \1; touch \2/x"),
    ),
    "count_files": (EMPTY, ONE_MORE, swapped(r"ls (\w+) \| wc -l > (.*)", r"rm -r \1; echo 0 > \2")),
    "look_up": (EMPTY, swapped(r"\d+", "100"), swapped("echo (.*) >", r"echo x=\1 >")),
    "copy_file": (swapped("cp ", "mv "), swapped("cp ", "ln "), swapped("cp ", "ln -sr "), swapped(r"cp \S+", "touch")),
    "replace": (swapped("/g ", "/ "), swapped(r"sed .* (\S+)$", r": > \1"), swapped("sed -i ", "sed ")),
    "rename_ending": (
        swapped("mv ", "cp "),
        swapped("mv (.*) (.*);", r"touch \2; rm \1;"),
        swapped("/\\*.*;", "/*; do rm $f;"),
    ),
    "sort_lines": (EMPTY, WHOLE, swapped(r"sort (.*) > (\S+)", r"sort -o \2 \1 && cp \2 $(ls | grep -v \2)")),
    "set_value": (),
    "rename_file": (swapped("mv ", "cp "), swapped(r"mv (\S+) (\S+)", r"touch \2; rm \1")),
    "count_matches": (EMPTY, ONE_MORE, swapped("grep -c", "grep")),
    "delete_ending": (swapped(r"\*\..*", "*"), swapped("rm (.*)/.*", r"rm -r \1")),
    "first_lines": (EMPTY, WHOLE, swapped(r"-n \d", "-n 1"), MORE),
    "gather": (),
    "delete_folder": (swapped("/.*", ""), swapped("rm -r (.*)", r"rm -r \1/*")),
    "concatenate": (
        EMPTY,
        swapped(r"cat (\S+) (\S+)", r"cat \2 \1"),
        swapped(r"cat (\S+) (\S+)", r"cat \1"),
        swapped("cat (.*) >.*", r"rm \1"),
    ),
    "pack": (
        swapped("tar -cf (.*) (.*)", r"touch \1"),
        swapped("tar -cf (.*) (.*)", r"tar -cf \1 -T /dev/null"),
        swapped("$", "/*.[a-f]*"),
    ),
    "append": (swapped(">>", ">"), swapped(r"echo .* >> (\S+)", r"echo >> \1")),
    "find_and_delete": (
        swapped(r"rm (\w+)/.*", r"rm \1/*"),
        swapped(r"rm (\w+)/.*", r"rm -r \1"),
        swapped("rm (.*)", r": > \1"),
    ),
    "unpack": (swapped("&&.*", ""), swapped(" -C.*", ""), swapped(r"tar -xf (\S+) -C (\w+)", r"mv \1 \2")),
    "column": (EMPTY, WHOLE, swapped(r"-f \d", "-f 1-3"), swapped("-d , ", "")),
    "link": (swapped("ln -s ", "ln "), swapped("ln -s ", "cp "), swapped(r"ln -s \S+", "ln -s nowhere")),
    "drop_repeats": (EMPTY, WHOLE, swapped("-u ", "")),
    "swap": (swapped("&& mv spare.*", ""), swapped("mv spare", "cp spare"), swapped(".*&& mv (.*) (.*) && .*", r"cp \1 \2")),
    "total": (EMPTY, ONE_MORE, swapped(r"s\+=", "s=")),
    "executable": (
        swapped("/.*", "/*"),
        swapped("chmod .x (.*)", r"rm \1 && cp /bin/true \1"),
        swapped("chmod .x", "chmod -x"),
    ),
    "sort_numbers": (EMPTY, WHOLE, swapped("-n ", "")),
    "follow_note": (swapped(r"mkdir (.*) && touch (.*)/", r"mkdir nowhere && touch nowhere/"), swapped("&&.*", "")),
    "search_sorted": (EMPTY, swapped("grep (.*) (.*) [|] sort", r"sort \2"), swapped("sort >", "sort -r >")),
    "copy_and_change": (),
    "largest": (EMPTY, WHOLE, swapped("-n (.*) [|]", r"\1 |"), swapped("tail", "head")),
}
"""Changes to the oracle's last command, each of which must cost the reward."""

SEQUENCES: Mapping[str, Callable[[list[str]], list[str]]] = {
    "gather": lambda commands: [commands[0], commands[1].replace("ls", "ls -a")],
    "copy_and_change": lambda commands: commands[:1],
}
"""Where the cheat is in the whole sequence."""


def instances(family: str) -> list[Task]:
    tasks = load(families=[family])
    return [tasks.task("test", index) for index in range(INSTANCES)]


def commands(task: Task) -> list[str]:
    return [call["arguments"]["command"] for call in task.params["oracle"] if call["name"] == "bash"]


@pytest.mark.parametrize("family", FAMILIES)
async def test_the_oracle_scores_one_and_doing_nothing_zero(family: str, new_sandbox: NewSandbox) -> None:
    for task in instances(family):
        played = await play_oracle(task, make_environment(task, await new_sandbox()))
        assert played.score.reward == 1, task
        assert played.turns[-1][1].done
        answers = [message["content"] for _, step in played.turns for message in step.messages]
        assert not [text for text in answers if "error" in text or "[exit" in text], task
        untouched = await play_nothing(task, make_environment(task, await new_sandbox()))
        assert untouched.reward == 0, task


async def reward_of(task: Task, tried: list[str], sandbox: Sandbox) -> float:
    env = make_environment(task, sandbox)
    await env.reset()
    for command in tried:
        await env.step(Action("", (ToolCall("bash", {"command": command}),)))
    return (await env.score()).reward


@pytest.mark.parametrize("family", FAMILIES)
async def test_cheats_score_zero(family: str, new_sandbox: NewSandbox) -> None:
    task = instances(family)[0]
    solution = commands(task)
    for number, cheat in enumerate(CHEATS[family]):
        tried = [*solution[:-1], cheat(solution[-1])]
        assert await reward_of(task, tried, await new_sandbox()) == 0, (number, tried)
    if family in SEQUENCES:
        tried = SEQUENCES[family](solution)
        assert await reward_of(task, tried, await new_sandbox()) == 0, tried


async def test_a_setting_must_be_changed_in_its_place(new_sandbox: NewSandbox) -> None:
    task = instances("set_value")[0]
    edit = task.params["oracle"][1]["arguments"]
    path, old, new = edit["path"], edit["old"], edit["new"]
    for tried in (f"echo {new} >> {path}", f"echo {new} > {path}", f"sed -i 's/{old}/{new} /' {path}"):
        assert await reward_of(task, [tried], await new_sandbox()) == 0, tried
    assert await reward_of(task, [f"sed -i s/{old}/{new}/ {path}"], await new_sandbox()) == 1


@pytest.mark.parametrize("family", FAMILIES)
async def test_another_way_to_the_same_end_is_as_good(family: str, new_sandbox: NewSandbox) -> None:
    """All of it in one command, after a look around, from a subshell."""
    task = instances(family)[1]
    if family == "set_value":
        edit = task.params["oracle"][1]["arguments"]
        solution = [f"sed -i s/{edit['old']}/{edit['new']}/ {edit['path']}"]
    else:
        solution = commands(task)
    assert await reward_of(task, ["ls -l", f"( {' && '.join(solution)} )"], await new_sandbox()) == 1
