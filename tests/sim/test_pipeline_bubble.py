"""How long stages wait for each other, with forwards that take as long on each of them."""

import pytest
from tests.fakes.timed_stages import TimedStage

from drumline.contract.layout import Layout
from drumline.replay.fleet import Asked, Scenario, play, submitting
from drumline.replay.simulator import small_specs

STAGE_US = 100_000


def bubble(stages, depth, asked, **specs):
    """Return the share of the work by which the pipeline took longer, the most of any stage."""
    layout = Layout(1, 1, stages)
    acts = {(0, 0): [submitting(one) for one in asked]}
    specs = small_specs(eos_token_ids=(511,), **specs)
    played = Scenario(layout, depth, specs, (0,) * layout.size, tuple(asked), acts)
    timed = {}

    def plant(rank, sim):
        timed[rank] = TimedStage(sim, lambda batch: STAGE_US)

    play(played, 1, plant).check()
    return max(stage.bubble for stage in timed.values())


def prompt(chunks):
    return [Asked(0, "r", tuple(range(1, 8 * chunks + 1)), 1, 1)]


def test_eight_chunks_on_two_stages_leave_a_bubble_of_at_most_15_percent():
    found = bubble(2, 2, prompt(8), max_scheduled_tokens=8)
    print(f"bubble of 8 chunks on 2 stages: {found:.1%}; one stage's time is 12.5%")  # noqa: T201
    assert 0.125 <= found <= 0.15


def test_it_is_the_depth_that_keeps_it_small():
    assert bubble(2, 0, prompt(8), max_scheduled_tokens=8) > 0.9
    assert bubble(3, 3, prompt(12), max_scheduled_tokens=8) <= 0.2
    assert bubble(3, 0, prompt(12), max_scheduled_tokens=8) > 1.8


@pytest.mark.parametrize("stages", [2, 3])
def test_decodes_keep_every_stage_computing(stages):
    asked = [Asked(0, f"r{n}", (n, 2, 3), 40, n) for n in range(2 * stages)]
    found = bubble(stages, stages, asked, num_pages=200)
    print(f"bubble of decodes on {stages} stages: {found:.1%}")  # noqa: T201
    assert found <= 0.1
    alone = bubble(stages, stages, asked[:1])
    assert alone > stages - 1.2, "one row has nobody to take turns with"
