"""The harness's own part at full size: ``python benchmarks/harness.py``.

Builds the requests of ``elude_forget`` for as many forget records as ELUDe has and forms its metrics from made-up model
answers; no model runs. The records are ELUDe-mini's, numbered so that no two are the same.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import tables

from lm_eval_elude.data import bundled, dataset
from lm_eval_elude.tasks.harness import EludeTask


def main() -> None:
    """Print a row for each stage: seconds and records per second."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=15_651)
    parser.add_argument("--docs", action="store_true", help="also write the table into docs/performance.md")
    options = parser.parse_args()
    count = options.records
    rows = [record.columns() for record in dataset.load_records("mini", "forget", "train").records]
    stages: list[tuple[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "forget.jsonl"
        many = ({**rows[i % len(rows)], "question": f"{i}: {rows[i % len(rows)]['question']}"} for i in range(count))
        file.write_text("".join(json.dumps(row) + "\n" for row in many), encoding="utf-8")
        metadata = {"pretrained": str(bundled.MODEL), "dataset": str(file)}

        def timed(name: str, start: float) -> None:
            stages.append((name, time.perf_counter() - start))

        start = time.perf_counter()
        task = EludeTask({"task": "elude_forget", "metadata": metadata})
        timed("load records", start)
        start = time.perf_counter()
        task.build_all_requests(limit=None, rank=0, world_size=1)
        timed("build requests, count tokens", start)
        by_doc: dict[int, list[object]] = {}
        for request in task.instances:
            made_up = request.doc["paraphrased_answer"] if request.request_type == "generate_until" else (-20.0, False)
            by_doc.setdefault(request.doc["id"], []).append(made_up)
        start = time.perf_counter()
        metrics = [task.process_results(doc, by_doc[doc["id"]]) for doc in task.eval_docs]
        timed("measure (ROUGE and all)", start)
        start = time.perf_counter()
        for name in metrics[0]:  # a backend without token log-probabilities lacks some
            task.aggregation()[name]([sample[name] for sample in metrics])
        timed("aggregate", start)
    took = [[name, f"{seconds:.1f}", f"{count / seconds:.0f}"] for name, seconds in stages]
    tables.show("harness", tables.markdown(["stage", "s", "records/s"], took), options.docs)


if __name__ == "__main__":
    main()
