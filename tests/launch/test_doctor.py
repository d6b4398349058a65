"""The examination of this machine, which must be able to run the tests."""

from recover.launch import doctor


def test_a_machine_that_runs_the_tests_is_healthy() -> None:
    checks = doctor.examine()
    assert [check for check in checks if not check.ok] == []
    assert checks[-1].name == "a job of two ranks survives the death of one"
