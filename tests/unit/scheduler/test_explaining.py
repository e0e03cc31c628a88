"""What is said of a request: why it waits, and how its prefix matched."""

from scheduler_rig import Rig

from drumline.contract.plan import encode_plan
from drumline.contract.specs import AttentionKind, CacheGroup


def test_nobody_knows_what_was_never_submitted():
    assert Rig().scheduler.explain("a") == "a: unknown"


def test_a_request_that_waits_for_a_row_says_so_and_who_is_before_it():
    rig = Rig(max_rows=1)
    rig.submit("a", [50, 51])
    rig.round()
    rig.submit("b", [60, 61])
    rig.submit("c", [70, 71, 72])
    assert rig.scheduler.explain("c") == (
        "c: waits, all 1 rows are taken, 1 requests are before it; "
        "0 of its 3 prompt tokens are cached"
    )


def test_a_request_without_room_says_what_it_found():
    rig = Rig(num_pages=10)
    rig.submit("a", 9, max_new_tokens=12)
    rig.round()
    rig.submit("big", [60 + at for at in range(16)], max_new_tokens=8)
    rig.submit("small", [90, 91])
    rig.round()
    text = rig.scheduler.explain("big")
    assert "its first chunk of a 16-token prompt found no room" in text
    assert "1 pages are empty, 1 blocks could be given up" in text


def test_a_request_that_was_passed_by_says_how_often_and_when_it_may_not_be_any_more():
    rig = Rig(num_pages=10, patience=1)
    rig.submit("a", [1, 2], max_new_tokens=12)
    rig.round()
    rig.submit("big", [60 + at for at in range(16)], max_new_tokens=8)
    rig.submit("small", [90, 91])
    rig.round()
    said = "1 plans admitted later ones, and none may pass it any more"
    assert said in rig.scheduler.explain("big")


def test_a_request_behind_an_unfinished_prompt_names_it():
    rig = Rig(max_scheduled_tokens=4)
    rig.submit("long", 12)
    rig.round()
    rig.submit("b", [90, 91])
    assert "the prompt of long is not finished" in rig.scheduler.explain("b")


def test_a_request_whose_prefix_is_computed_now_says_so():
    rig = Rig()
    rig.submit("a", 9)
    rig.submit("b", 12)
    rig.plan()
    assert "another request is computing its prefix" in rig.scheduler.explain("b")


def test_what_is_cached_of_a_waiting_prompt_is_told_and_what_windows_lack_of_it():
    window = CacheGroup(
        group_id="window", kind=AttentionKind.SLIDING_WINDOW, block_tokens=4, window_tokens=4
    )
    full = CacheGroup(group_id="full", block_tokens=4)
    rig = Rig(groups=(full, window), max_rows=1)
    rig.submit("a", 16)
    rig.round()
    rig.round()
    rig.submit("b", [*range(12), 90, 91])
    assert rig.scheduler.explain("b").endswith(
        "0 of its 14 prompt tokens are cached, 12 but for windows or state groups"
    )
    assert "of them were cached; row 1, 18 tokens known" in rig.scheduler.explain("a")


def test_where_nothing_is_cached_that_is_said():
    rig = Rig(prefix_caching=False)
    rig.submit("a", 4)
    assert rig.scheduler.explain("a").endswith(
        "for its turn, 0 requests are before it; prefixes are not cached"
    )


def test_a_suspended_request_and_who_waits_for_it_say_so():
    rig = Rig(num_pages=8, num_snapshot_pages=12, max_retracted_requests=2)
    rig.submit("a", [50 + at for at in range(8)])
    rig.submit("b", [80 + at for at in range(8)])
    while not rig.scheduler.sizes().retracted:
        rig.round()
    rig.submit("c", [1, 2])
    suspended = next(rid for rid in "ab" if "retracted" in rig.scheduler.explain(rid))
    assert "suspended until its blocks fit again" in rig.scheduler.explain(suspended)
    assert "1 suspended requests come back first" in rig.scheduler.explain("c")


def test_asking_changes_no_plan():
    plans = []
    for asking in (False, True):
        rig = Rig(num_pages=16, max_rows=2)
        for number in range(6):
            rig.submit(f"r{number}", range(number % 2, 9 + number))
        for _ in range(12):
            if asking:
                for number in range(6):
                    rig.scheduler.explain(f"r{number}")
            rig.round()
        plans.append([encode_plan(plan) for plan in rig.plans])
    assert plans[0] == plans[1]
