"""Check prices of serving whose prefills and decodes run on workers of their own, on measured rows.

python benchmarks/serving_apart.py serving_silicon.csv

Rows without the number of workers are taken for one of each kind, and the requests in flight for those of the decoding
workers together. The cache moves at the rate of one link between the workers' nodes.
"""

from __future__ import annotations

import argparse
import csv
import re
from statistics import median

from serving import ENGINES, MODELS, cluster_named, work_for

from cost_models.serving.queueing import ServedTimes, serve_disaggregated
from cost_models.serving.step_price import step_seconds
from cost_models.serving.work import StepWork
from hardware_profiles.engines import engine_named

LINK_BYTES_PER_SECOND = 40e9


def whole(row: dict[str, str], column: str) -> int:
    """Return a number of a row, 1 where it is not recorded."""
    return max(1, int(row[column] or 1))


def price(row: dict[str, str]) -> ServedTimes:
    """Return the predicted times of a measured row."""
    source = row["silicon_data_source"]
    own = "source_file=2026-" in source
    engine, cluster = engine_named(ENGINES[row["backend"]]), cluster_named(row["system"])

    def work(kind: str) -> StepWork:
        layout = (whole(row, f"{kind}_{of}_size") for of in ("tp", "attention_dp", "moe_ep"))
        return work_for(MODELS[row["model_path"]], row["precision"], own, row["backend"], row["system"], *layout)

    prefill, decode = work("prefill"), work("decode")
    ranks = whole(row, "decode_num_workers") * whole(row, "decode_attention_dp_size")
    together = re.search(r"silicon_concurrency=(\d+)", source)
    in_flight = max(1, int(together[1]) // ranks) if own and together else whole(row, "decode_batch_size")
    tokens = int(row["isl"])
    return serve_disaggregated(
        lambda batch: step_seconds(prefill, batch, cluster, engine).seconds,
        lambda batch: step_seconds(decode, batch, cluster, engine).seconds,
        input_tokens=tokens, output_tokens=int(row["osl"]),
        prefill_workers=whole(row, "prefill_num_workers") * whole(row, "prefill_attention_dp_size"),
        decode_workers=ranks, prefill_batch=whole(row, "prefill_batch_size"), decode_in_flight=in_flight,
        transfer_seconds=tokens * prefill.cache_bytes_per_token / LINK_BYTES_PER_SECOND,
        overhead_seconds=engine.first_token_seconds,
    )  # fmt: skip


def main() -> None:
    """Print each row and the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows")
    ratios = []
    with open(parser.parse_args().rows, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["mode"] != "disagg":
                continue
            times = price(row)
            measured = float(row["silicon_ttft_ms"]), float(row["silicon_tpot_ms"])
            priced = 1e3 * times.first_token_seconds, 1e3 * times.token_seconds
            ratios.append([p / m for p, m in zip(priced, measured, strict=True)])
            print(f"{row['id'][:72]:72} first {measured[0]:8.1f} priced {priced[0]:8.1f}"
                  f"   token {measured[1]:6.1f} priced {priced[1]:6.1f} ms")  # fmt: skip
    for name, of in zip(("first token", "token"), zip(*ratios, strict=True), strict=True):
        error = median(abs(r - 1) for r in of)
        print(f"{name}: median error {error:.1%}, median of priced / measured {median(of):.2f}")


if __name__ == "__main__":
    main()
