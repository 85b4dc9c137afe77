"""The commit-msg hook of ``make install``, with real commits of a clone that has nothing but the script."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = Path("deploy/commit-msg")
WHY = "Because it was wrong."
GOOD = (
    "Add a test",
    "Refuse optimizer factories that ascend",
    "Bring the service back, and Ping it",
    "Pass the address on",
    "Feed what was shed",
    "Re-read the tape at its end",
    "X" + "y" * 71,
    f"Add a test\n\n{WHY}\n\n# no comment, for no editor was used\n",
)
BAD = {
    "Added a test": 'begins with "Added"',
    "Adds a test": 'begins with "Adds"',
    "Adding a test": 'begins with "Adding"',
    "The test": 'begins with "The"',
    "A test": 'begins with "A"',
    "Made a test": 'begins with "Made"',
    "fix: the test": 'begins with "fix:". Begin with a capitalised verb',
    "x": 'begins with "x"',
    "Add a test.": "ends with a full stop",
    "Add a test; mend another": 'has a ";"',
    "Add " + "ä" * 69: "has 73 characters; 72 are the most",
    f"Add a test\n{WHY}": "second line is not empty",
}


class Clone:
    """A repository in ``folder`` with the script, isolated from the settings of this machine and user."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        self.environment = {
            **own,
            "HOME": str(folder.parent),
            "GIT_CONFIG_NOSYSTEM": "1",
            "XDG_CONFIG_HOME": "/nowhere",
        }
        self.script(folder)
        self.git("init", "--quiet", "--initial-branch", "main")
        for name, value in (("user.name", "Somebody"), ("user.email", "somebody@example.org")):
            self.git("config", name, value)

    def script(self, folder: Path) -> None:
        (folder / "deploy").mkdir(parents=True)
        shutil.copy(ROOT / SCRIPT, folder / SCRIPT)

    def install(self, folder: Path | None = None) -> str:
        """Install the hook and return what that says. It never fails."""
        command = [sys.executable, str(SCRIPT), "--install"]
        done = self._run(command, folder or self.folder)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        return done.stdout

    def git(self, *arguments: str, folder: Path | None = None, **environment: str) -> str:
        done = self._run(["git", *arguments], folder or self.folder, **environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def commit(self, message: str, *options: str, files: int = 1, folder: Path | None = None) -> str:
        """Commit ``files`` changed files. Return what the hook says against it; an empty text if it accepts."""
        place = folder or self.folder
        for number in range(files):
            with (place / f"{number}.txt").open("a") as file:
                file.write("more\n")
        self.git("add", "--all", folder=place)
        done = self._run(["git", "commit", "--quiet", "--message", message, *options], place)
        assert (done.returncode == 0) == ("commit message needs" not in done.stderr), done.stderr
        return done.stderr if done.returncode else ""

    @property
    def subjects(self) -> list[str]:
        return self.git("log", "--format=%s").splitlines()

    @property
    def hook(self) -> Path:
        return self.folder / ".git" / "hooks" / "commit-msg"

    def _run(self, command: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
        variables = {**self.environment, **environment}
        return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path / "clone")


@pytest.fixture
def hooked(clone: Clone) -> Clone:
    assert clone.install() == ""
    assert clone.commit("Begin") == ""
    return clone


# ── what is accepted ──────────────────────────────────────────────────────────────────────────────────────────────


def test_good_messages_pass(hooked: Clone) -> None:
    for message in (GOOD[0], GOOD[-1]):
        assert hooked.commit(message) == "", message
    assert len(hooked.subjects) == 3
    assert {message: problems_of(message) for message in GOOD} == {message: [] for message in GOOD}


def test_a_bad_message_is_refused_and_says_what_to_do(hooked: Clone) -> None:
    for message, problem in list(BAD.items())[:2]:
        said = hooked.commit(message)
        assert problem in said, message
        assert said.count("\n  - ") == 1, said
        assert "git commit --edit --file=" in said
        assert "CONTRIBUTING.md" in said
    assert hooked.subjects == ["Begin"]
    for message, problem in BAD.items():
        (said,) = problems_of(message)
        assert problem in said, message


def problems_of(message: str) -> list[str]:
    """What the hook would say of this message, without a commit, which takes five processes."""
    rules = runpy.run_path(str(ROOT / SCRIPT))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GIT_EDITOR", ":")  # as git says where no editor is used
        problems: list[str] = rules["problems_of"](*rules["parts_of"](message), 1)
    return problems


def test_all_problems_are_told_at_once(hooked: Clone) -> None:
    said = hooked.commit("Fixed this; and that.", files=4)
    assert said.count("\n  - ") == 4
    assert "changes 4 files and has no body" in said


def test_more_than_three_files_need_a_body_that_is_no_trailer(hooked: Clone) -> None:
    assert hooked.commit("Add a test", files=3) == ""
    assert "has no body" in hooked.commit("Add a test", files=4)
    assert "has no body" in hooked.commit("Add a test\n\nSigned-off-by: Somebody <somebody@example.org>", files=4)
    assert hooked.commit(f"Add a test\n\n{WHY}", files=4) == ""


def test_a_renamed_file_is_one_file(hooked: Clone) -> None:
    hooked.commit(f"Add files\n\n{WHY}", files=4)
    for number in range(3):
        hooked.git("mv", f"{number}.txt", f"renamed-{number}.txt")
    hooked.git("commit", "--quiet", "--message", "Rename files")
    assert hooked.subjects[0] == "Rename files"


def test_the_first_commit_of_all_is_checked_as_well(clone: Clone) -> None:
    clone.install()
    assert "changes 5 files" in clone.commit("Begin", files=4)  # and the script


def test_an_amended_commit_is_judged_by_all_of_its_files(hooked: Clone) -> None:
    hooked.commit(f"Add files\n\n{WHY}", "--date", "2020-01-01T00:00:00", files=4)
    assert "changes 4 files and has no body" in hooked.commit("Add files", "--amend", files=1)
    assert "changes 4 files and has no body" in hooked.commit("Add files", "--amend", files=0)
    assert hooked.commit(f"Add files once\n\n{WHY}", "--amend", files=0) == ""


def test_comments_and_the_diff_in_an_editor_do_not_count(hooked: Clone) -> None:
    editor = hooked.folder.parent / "editor"
    editor.write_text('#!/bin/sh\n{ printf \'Add a test\\n\\n\'; cat "$1"; } >"$1.new" && mv "$1.new" "$1"\n')
    editor.chmod(0o755)
    for number in range(4):
        (hooked.folder / f"{number}.txt").write_text("changed; and more.\n")
    hooked.git("add", "--all")
    done = hooked._run(["git", "commit", "--verbose"], hooked.folder, GIT_EDITOR=str(editor))
    assert "changes 4 files and has no body" in done.stderr
    hooked.git("reset", "--quiet", "1.txt")
    hooked.git("commit", "--quiet", "--verbose", GIT_EDITOR=str(editor))
    assert hooked.subjects[0] == "Add a test"


def test_what_git_writes_passes(hooked: Clone) -> None:
    hooked.git("switch", "--quiet", "--create", "other")
    hooked.commit(f"Add files\n\n{WHY}", files=5)
    hooked.git("switch", "--quiet", "main")
    (hooked.folder / "main.txt").write_text("main\n")
    hooked.git("add", "main.txt")
    assert hooked.commit("Add a file", files=0) == ""
    hooked.git("merge", "--quiet", "--no-ff", "--no-edit", "other")
    hooked.git("revert", "--no-edit", "HEAD^")
    assert hooked.commit("fixup! Begin", files=5) == ""
    assert hooked.commit("squash! Begin", files=5) == ""
    assert [subject.split()[0] for subject in hooked.subjects[:4]] == ["squash!", "fixup!", "Revert", "Merge"]


# ── where it is installed ─────────────────────────────────────────────────────────────────────────────────────────


def test_it_holds_in_every_worktree_and_installs_from_each(hooked: Clone) -> None:
    beside = hooked.folder.parent / "beside"
    hooked.git("worktree", "add", "--quiet", str(beside))
    assert "begins with" in hooked.commit("Added a test", folder=beside)
    hooked.hook.unlink()
    assert hooked.install(beside) == ""
    assert "begins with" in hooked.commit("Added a test")


def test_a_checkout_of_before_the_script_commits_as_ever(hooked: Clone) -> None:
    hooked.git("rm", "--quiet", "--force", str(SCRIPT))
    assert hooked.commit("added a test.") == ""


def test_a_hook_of_somebody_else_is_left_alone(clone: Clone) -> None:
    clone.hook.parent.mkdir(exist_ok=True)
    for make in (lambda path: path.write_text("#!/bin/sh\n"), lambda path: path.symlink_to("nowhere")):
        clone.hook.unlink(missing_ok=True)
        make(clone.hook)
        before = os.readlink(clone.hook) if clone.hook.is_symlink() else clone.hook.read_text()
        said = clone.install()
        assert f"{clone.hook} is a hook of your own" in said
        assert "deploy/commit-msg FILE" in said
        assert before == (os.readlink(clone.hook) if clone.hook.is_symlink() else clone.hook.read_text())


def test_an_older_hook_of_ours_is_renewed(hooked: Clone) -> None:
    before = hooked.hook.read_text()
    hooked.hook.write_text(before.replace("python3.11", "python3.10"))
    assert hooked.install() == ""
    assert hooked.hook.read_text() == before
    assert os.listdir(hooked.hook.parent).count("commit-msg") == 1


def test_it_goes_where_core_hookspath_says(clone: Clone) -> None:
    clone.git("config", "core.hooksPath", "own-hooks")
    assert clone.install() == ""
    assert not clone.hook.exists()
    assert (clone.folder / "own-hooks" / "commit-msg").exists()
    assert "begins with" in clone.commit("Added a test")


def test_it_is_not_put_among_the_hooks_of_all_clones_of_a_user(clone: Clone) -> None:
    everywhere = clone.folder.parent / "everywhere"
    clone.git("config", "--global", "core.hooksPath", str(everywhere))
    assert "of all your clones" in clone.install()
    assert not everywhere.exists()


def test_a_copy_without_a_repository_installs_nothing_also_inside_of_another_one(clone: Clone) -> None:
    copy = clone.folder / "vendored"
    clone.script(copy)
    assert clone.install(copy) == ""
    assert not clone.hook.exists()
    alone = clone.folder.parent / "alone"
    clone.script(alone)
    assert clone.install(alone) == ""


def test_without_git_there_is_no_hook_and_no_failure(clone: Clone) -> None:
    clone.environment["PATH"] = "/nowhere"
    assert "are not checked" in clone.install()


def test_make_install_installs_it() -> None:
    command = ["make", "--dry-run", "--always-make", "install"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert said.splitlines().count(".venv/bin/python deploy/commit-msg --install") == 1
