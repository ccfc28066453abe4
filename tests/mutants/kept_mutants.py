"""Ways to break the steps whose blocks kvd keeps, on the member's side."""

from __future__ import annotations

from typing import Final

from tests.mutants.patches import Mutant

CALLS: Final = "engine_shim.client.step_calls"
CLIENT: Final = ("kept steps of a client",)
PIPELINE: Final = ("kept steps",)

MUTANTS: Final = (
    Mutant(
        "a step is closed while its copies run",
        CALLS,
        "        if not kept.closes or kept.copies or kept.closed:\n",
        "        if not kept.closes or kept.closed:\n",
        CLIENT,
    ),
    Mutant(
        "a step is closed again by every copy that ends",
        CALLS,
        "        kept.closed = True\n",
        "",
        CLIENT,
    ),
    Mutant(
        "a step is not closed when another kvd came after it was asked for",
        CALLS,
        "        return [StepClosedItem(kept.number)]\n",
        "        is_void = kept.generation != self._core.generation\n"
        "        return [] if is_void else [StepClosedItem(kept.number)]\n",
        CLIENT,
    ),
    Mutant(
        "a step that was refused is not closed",
        CALLS,
        "        return [StepClosedItem(kept.number)]\n",
        "        return [] if kept.is_refused else [StepClosedItem(kept.number)]\n",
        CLIENT,
    ),
    Mutant(
        "what was kept by one kvd counts at the next",
        CALLS,
        "core.state is LinkState.ATTACHED and kept.generation == core.generation\n",
        "core.state is LinkState.ATTACHED\n",
        CLIENT,
    ),
    Mutant(
        "copies begin on the word of a kvd that may be dead",
        CALLS,
        "core.state is LinkState.ATTACHED and kept.generation == core.generation\n",
        "kept.generation == core.generation\n",
        CLIENT,
    ),
    Mutant(
        "copies begin for a step that is closing",
        CALLS,
        "is_present and not (kept.closes or kept.is_refused)\n",
        "is_present and not kept.is_refused\n",
        CLIENT,
    ),
    Mutant(
        "a step that was refused is waited for by its layers",
        CALLS,
        "is_present and not (kept.closes or kept.is_refused)\n",
        "is_present and not kept.closes\n",
        CLIENT,
    ),
    Mutant(
        "a save of a step begins before the step has its yes",
        "engine_shim.client.announcements",
        "            armed = use.armed if kept is not None and kept.is_kept else None\n",
        "            armed = use.armed if kept is not None else None\n",
        CLIENT,
    ),
    Mutant(
        "what rides of a step is waited for",
        "engine_shim.client.announcements",
        "            is_awaited = bool(reads) or (bool(saves) and kept is None)\n",
        "            is_awaited = bool(reads) or bool(saves)\n",
        CLIENT,
    ),
    Mutant(
        "what the next kvd says of a save is why it was lost",
        "engine_shim.client.announcements",
        "        if is_lost:\n            # Whatever",
        "        if is_lost and not code:\n            # Whatever",
        CLIENT,
    ),
    Mutant(
        "only the last who asked is called",
        "engine_shim.client.tickets",
        "                self._then.append(call)\n",
        "                self._then[:] = [call]\n",
        CLIENT,
    ),
    Mutant(
        "a save that kvd refused when it was copied counts as saved",
        "engine_shim.saver",
        "        if heard.code or not heard.is_settled:\n",
        "        if not heard.is_settled:\n",
        PIPELINE,
    ),
    Mutant(
        "a load that kvd refused when it was copied is used on",
        "engine_shim.loader",
        "        if heard.code and heard.code not in NOT_OF_ROWS:\n",
        "        if False:\n",
        PIPELINE,
    ),
    Mutant(
        "a load whose step was refused begins all the same",
        "engine_shim.loader",
        "        if ticket.is_settled and not ticket.code:\n            self._device",
        "        if ticket.is_settled:\n            self._device",
        PIPELINE,
    ),
    Mutant(
        "a load whose step was refused is believed for what was said to the step",
        "engine_shim.client.desk",
        "if use.kept is not None and use.kept.is_kept else None",
        "if use.kept is not None else None",
        CLIENT,
    ),
    Mutant(
        "the rows of another layer are copied",
        "engine_shim.layer_rows",
        "                    return _elsewhere(last.plan, *shift)\n",
        "                    return last.plan\n",
        PIPELINE,
    ),
    Mutant(
        "a step that was aborted is not closed",
        "engine_shim.pipeline",
        "        self._let_go(step)\n        self._keeper.close(step)\n",
        "        self._let_go(step)\n",
        PIPELINE,
    ),
    Mutant(
        "a step that could not be begun is not closed",
        "engine_shim.pipeline",
        "                self._step = None\n                self._keeper.close(step)\n",
        "                self._step = None\n",
        PIPELINE,
    ),
    Mutant(
        "a step that kvd does not keep ends before kvd knows of its saves",
        "engine_shim.pipeline",
        "        if wait_armed or (wait_saves and step.kept_saves is None):",
        "        if False:",
        ("connector pipeline",),
    ),
    Mutant(
        "threads share the list of what is loaded",
        "engine_shim.steps",
        "request, have in missing]\n        return known[1]\n",
        "request, have in missing]\n        return self._loaded[1]\n",
        PIPELINE,
    ),
    Mutant(
        "a slot that was given up while it was loaded is never let go",
        "engine_shim.loader",
        "        if state.is_let_go and state.tenancy is not None:\n",
        "        if False:\n",
        PIPELINE,
    ),
)
