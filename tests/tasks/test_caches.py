"""What one model answered is never taken for another's, and sampled answers say so."""

import pytest

from lm_eval_elude.errors import UserError
from lm_eval_elude.tasks.runs import Run
from tests.support import elude, make_model, make_tokenizer, run, save_checkpoint, small_data, write_run

RONALDO = "Cristiano Ronaldo"


@pytest.fixture(scope="module")
def about(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    data = small_data(folder / "data", {RONALDO: 3})
    tokenizer = make_tokenizer("chatml")
    places = [save_checkpoint(folder / name, make_model(tokenizer, seed=i), tokenizer) for i, name in enumerate("ab")]
    return [{"pretrained": place, "target": RONALDO, "dataset": str(data)} for place in places]


def test_the_cache_of_another_model_is_refused(about, tmp_path):
    cache = {"use_cache": str(tmp_path / "cache"), "log_samples": True}
    first = run(["elude_forget"], metadata=about[0], **cache)["results"]["elude_forget"]
    again = run(["elude_forget"], metadata=about[0], **cache)["results"]["elude_forget"]
    assert again == first
    with pytest.raises(UserError, match=r"--use_cache .*cache.*: has the answers of another model"):
        run(["elude_forget"], metadata=about[1], **cache)


def test_sampled_answers_are_marked_and_not_submitted(about, tmp_path):
    found = run(
        ["elude_forget"], metadata=about[0], gen_kwargs={"do_sample": True, "temperature": 0.7}, log_samples=True
    )
    results = write_run(found, tmp_path / "out")
    assert Run(results).settings("elude_forget")["sampled"] is True
    done = elude(
        "submit", tmp_path, "--model", "org/x", "--revision", "0" * 40, "--table", "t", "--method", "m",
        "--contact", "c", "--results", results,
    )  # fmt: skip
    assert done.code == 2 and "answers were sampled" in done.err and not list(tmp_path.glob("*.yaml"))
