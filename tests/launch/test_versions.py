"""What a run folder says about the code that ran."""

import subprocess

from launch.versions import code_commit, describe_versions


def test_the_commit_is_that_of_the_code_and_of_nothing_else(tmp_path):
    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    assert code_commit(package) is None
    git("init")
    assert code_commit(package) is None  # installed inside a repository that does not track it
    git("add", "package")
    git("commit", "-m", "x")
    assert code_commit(package)["dirty"] is False
    (package / "__init__.py").write_text("1")
    assert code_commit(package)["dirty"] is True
    assert describe_versions()["packages"]["pydantic"]
