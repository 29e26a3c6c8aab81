"""Words of the checks that measure or compute."""

from __future__ import annotations

from collections.abc import Mapping

from sanitycheck.reasons import Reason
from sanitycheck.render.texts.wording import Text

__all__ = ["MEASURES"]

MEASURES: Mapping[Reason, Text] = {
    Reason.CONTEXT_MADE: Text("made, written and read on {count} devices, within {took_s}", "nothing to do"),
    Reason.CONTEXT_FAILED: Text(
        "nothing can be started on it: {problem}",
        "see gpu.inventory and gpu.processes; reset the device or restart the node",
    ),
    Reason.CONTEXT_WRONG: Text(
        "{count} bytes came back wrong", "do not train here; drain the node and have the device replaced"
    ),
    Reason.PERF_MEASURED: Text("{rate} {unit} at least on {count} devices", "nothing to do"),
    Reason.PERF_SLOW: Text(
        "{rate} {unit}, {share} of the {expected} to be expected",
        "check clocks, power cap, temperature and what else runs there; then repeat",
    ),
    Reason.PERF_SPREAD: Text(
        "{rate} {unit}, {share} of what its siblings reach ({expected})",
        "it sets the pace of the whole job: check its clocks, power cap and cooling",
    ),
    Reason.PERF_BROKEN: Text("could not be measured: {problem}", "see gpu.context; then repeat"),
    Reason.PERF_ONE_DEVICE: Text("one device has nobody to copy to", "nothing to do"),
    Reason.MEMORY_PATTERN: Text(
        "{tested_bytes} and more written and read back on {count} devices", "nothing to do"
    ),
    Reason.MEMORY_PATTERN_WRONG: Text(
        "{count} of {tested_bytes} came back wrong",
        "do not train here; drain the node and have the device replaced",
    ),
    Reason.MEMORY_PATTERN_PART: Text(
        "only {tested_bytes} of {free_bytes} free memory could be tested", "run it on an idle device"
    ),
    Reason.SUSTAINED: Text("never below {rate} TFLOP/s over minutes on {count} devices", "nothing to do"),
    Reason.SUSTAINED_DROP: Text(
        "fell from {early} to {late} TFLOP/s ({share})", "check cooling and power; it slows down when warm"
    ),
    Reason.DCGM_PASSED: Text("{count} tests passed", "nothing to do"),
    Reason.DCGM_FAILED: Text(
        "{name}: {status}: {info}", "see dcgmi diag -r 3 -v; drain the node if it stays"
    ),
    Reason.BITS_DIFFER_DEVICE: Text(
        "the same work gave other bits ({digest}) than on its siblings or before ({usual}, {model})",
        "do not train here; drain the node and have the device tested (level deep)",
    ),
    Reason.BITS_NOT_COMPARED: Text("could not be compared: {message}", "see gpu.context; then repeat"),
    Reason.MEMBW: Text("{gb_s} GB/s read and written by {threads} threads", "nothing to do"),
    Reason.MEMBW_SLOW: Text(
        "{gb_s} GB/s, {share} of what this node once gave ({baseline})",
        "see what else runs here, and whether a memory module is missing; then repeat",
    ),
    Reason.MEMBW_WRONG: Text(
        "copied memory holds other bytes than its source",
        "do not train here; drain the node and test its memory",
    ),
    Reason.TRAINED: Text(
        "loss {first_loss} to {last_loss} in {steps} steps, equal on all ranks, {tokens_per_s} tokens/s",
        "nothing to do",
    ),
    Reason.TRAIN_LOSS_STUCK: Text(
        "the loss does not fall: {first_loss} to {last_loss} in {steps} steps",
        "do not train here; this node computes wrongly (see num.bitwise and coll.intra)",
    ),
    Reason.TRAIN_RANKS_DIFFER: Text(
        "the ranks ended with different weights: {digests}",
        "do not train here; this node computes or exchanges wrongly",
    ),
    Reason.TRAIN_DIGEST_DIFFERS: Text(
        "weights {digest}, the record for the same software and processor says {expected}",
        "do not train here until it is explained; compare with a second node, then record anew",
    ),
    Reason.TRAIN_BROKEN: Text(
        "two ranks could not train together: {problem}", "see coll.intra; check that loopback works"
    ),
}
