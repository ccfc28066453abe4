"""Ways to break the vLLM connector, and what the prefill pipeline does for it."""

from __future__ import annotations

from typing import Final

from tests.mutants.patches import Mutant

SCHEDULER: Final = ("connector scheduler",)
WORKER: Final = ("connector worker",)
PIPELINE: Final = ("connector pipeline",)
DRAFTS: Final = ("connector drafts",)

MUTANTS: Final = (
    Mutant(
        "a draft layer lets go of its buffer before it has run for the last time",
        "engine_shim.vllm.worker",
        "self._failure is None and layer not in self._drafts:\n",
        "self._failure is None:\n",
        DRAFTS,
    ),
    Mutant(
        "the report of a step that is asked for early is not of its drafts",
        "engine_shim.vllm.worker",
        "        if self._is_open:\n            return self._report\n",
        "",
        DRAFTS,
    ),
    Mutant(
        "a draft layer runs again in a buffer that another has taken over",
        "engine_shim.vllm.worker",
        "        if layer in self._drafts and self._was_let_go(layer):\n",
        "        if False:\n",
        DRAFTS,
    ),
    Mutant(
        "a slot is let go while the announcement of its saves is refused for another's load",
        "engine_shim.pipeline",
        "            if self._options.shares_spans and state.armed is not None:\n",
        "            if False:\n",
        ("shim under pressure",),
    ),
    Mutant(
        "opaque blocks are loaded by rows",
        "engine_shim.layer_rows",
        "        have, end = self._moved(have, request.num_computed)\n",
        "        end = request.num_computed\n",
        PIPELINE,
    ),
    Mutant(
        "the checksum of an opaque block is compared with its valid rows only",
        "engine_shim.layer_rows",
        "        covered = size if self._opaque or known is None else known.tokens\n",
        "        covered = size if known is None else known.tokens\n",
        PIPELINE,
    ),
    Mutant(
        "an idle step ignores saves in flight",
        "engine_shim.pipeline",
        "        return not (self._ring.reuse or self._order.saves_open or self._has_offered)\n",
        "        return not (self._ring.reuse or self._has_offered)\n",
        PIPELINE,
    ),
    Mutant(
        "an idle step ignores reads that were offered",
        "engine_shim.pipeline",
        "        return not (self._ring.reuse or self._order.saves_open or self._has_offered)\n",
        "        return not (self._ring.reuse or self._order.saves_open)\n",
        PIPELINE,
    ),
    Mutant(
        "rows are written before the load of their block has ended",
        "engine_shim.pipeline",
        'in ((state.acquired, "slot"), (state.loaded, "load")):\n',
        'in ((state.acquired, "slot"),):\n',
        WORKER,
    ),
    Mutant(
        "rows of a request that has failed are saved on",
        "engine_shim.pipeline",
        "        live = step.live_in(layer)\n        optional = ",
        "        live = step.requests\n        optional = ",
        PIPELINE,
    ),
    Mutant(
        "a lost save is not told to the next step",
        "engine_shim.pipeline",
        "            lost = None if request.optional else self._saver.lost.why(request.request)\n",
        "            lost = None\n",
        WORKER,
    ),
    Mutant(
        "a step ends before kvd has heard of its saves",
        "engine_shim.vllm.worker",
        "end_step(wait_saves=False, wait_armed=True)",
        "end_step(wait_saves=False, wait_armed=False)",
        PIPELINE,
    ),
    Mutant(
        "the gate may be asked after the write",
        "engine_shim.vllm.worker",
        "            if layer > self._gated:\n",
        "            if layer < 0:\n",
        WORKER,
    ),
    Mutant(
        "a failed step is not reported for those of which nothing is moved",
        "engine_shim.vllm.worker",
        "in self._order.others.items():\n",
        "in ():\n",
        WORKER,
    ),
    Mutant(
        "the last block before a draft layer is trusted",
        "engine_shim.vllm.scheduler",
        "            if self._plan.draft_layers and pooled.hit_tokens:\n",
        "            if pooled.hit_tokens < 0:\n",
        SCHEDULER,
    ),
    Mutant(
        "a block that is not trusted stays pinned",
        "engine_shim.requests",
        "        self._client.unpin(pooled.request, [dropped])\n",
        "",
        SCHEDULER,
    ),
    Mutant(
        "the end of a request does not wait for its last step",
        "engine_shim.vllm.parting",
        "        now = [one for one in self._waiting if one.last_step <= steps_done]\n",
        "        now, steps_done = self._waiting, 1 << 60\n",
        SCHEDULER,
    ),
    Mutant(
        "an end that kvd did not hear is not told again",
        "engine_shim.vllm.parting",
        "            return refusal.code not in UNHEARD\n",
        "            return True\n",
        SCHEDULER,
    ),
    Mutant(
        "a failed load restarts behind rows that were never loaded",
        "engine_shim.vllm.scheduler",
        "dict(tracked.floors).get(self._steps_done, 0)",
        "tracked.resident",
        SCHEDULER,
    ),
    Mutant(
        "who waits keeps the pool from who runs",
        "engine_shim.vllm.scheduler",
        "            if refusal.code != POOL_FULL or not self._take_from_waiting(running):\n",
        "            if refusal.code:\n",
        (*SCHEDULER, "connector machine"),
    ),
    Mutant(
        "guesses fill a block",
        "engine_shim.vllm.shares",
        "    end = start + share.tokens - share.drafts\n",
        "    end = start + share.tokens\n",
        SCHEDULER,
    ),
    Mutant(
        "prefixes of a region that kvd has lost are still found",
        "engine_shim.vllm.sparse_scheduler",
        "            self.forget_prefixes()\n",
        "",
        ("connector region",),
    ),
    Mutant(
        "who is new does not wait for a region that is lost",
        "engine_shim.vllm.sparse_scheduler",
        "        if self._life == self._whole_life:\n",
        "        if self._life >= 0:\n",
        ("connector region",),
    ),
    Mutant(
        "each look at a kvd without the region begins another life",
        "engine_shim.vllm.sparse_scheduler",
        "        elif has_region is not None and generation != self._lost_in:\n",
        "        elif has_region is not None:\n",
        ("connector region",),
    ),
    Mutant(
        "a kvd that says nothing is taken for one without the region",
        "engine_shim.vllm.sparse_scheduler",
        'return False if refusal.code == "region_unknown" else None',
        "return False",
        ("connector region",),
    ),
    Mutant(
        "a lost region is unmapped while a copy may read it",
        "engine_shim.vllm.sparse_memory",
        "        self.close()\n        self._client.region_forget(self._name)\n",
        "        self._client.region_forget(self._name)\n        self.close()\n",
        ("connector region",),
    ),
)
