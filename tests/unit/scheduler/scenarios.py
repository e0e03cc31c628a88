"""Which tests try which scenario of what a scheduler must do.

The numbers are those of the list that the scheduler was specified by: the life cycle (1 …
12), batching (… 23), blocks (… 32), reservation (… 37), prefixes (… 50), retraction (… 56),
the host tier (… 61), prefill and decode engines (… 65), storage (… 71), KV events and
clearing (… 74).
"""

SCENARIOS: dict[int, tuple[str, ...]] = {
    1: ("test_lifecycle.test_a_submitted_request_waits",),
    2: ("test_lifecycle.test_the_first_plan_prefills",),
    3: ("test_lifecycle.test_the_plan_after_the_prompt_decodes",),
    4: ("test_lifecycle.test_a_finished_request_is_forgotten_by_the_next_plan",),
    5: ("test_lifecycle.test_a_result_lengthens_the_request",),
    6: ("test_lifecycle.test_finishing_what_was_not_started_is_illegal_and_changes_nothing",),
    7: ("test_lifecycle.test_a_duplicate_id_refuses_the_whole_batch",),
    8: ("test_lifecycle.test_a_request_that_cannot_be_served_is_refused_with_the_reason",),
    9: ("test_lifecycle.test_an_abort_in_any_state_gives_everything_back",),
    10: ("test_lifecycle.test_a_finish_with_results_outstanding_holds_its_pages_until_they_came",),
    11: (
        "test_lifecycle.test_a_finished_request_is_forgotten_by_the_next_plan",
        "test_lifecycle.test_a_duplicate_id_refuses_the_whole_batch",
    ),
    12: ("test_lifecycle.test_a_chunk_owes_no_tokens",),
    13: ("test_batching.test_a_long_prompt_is_cut_into_chunks_of_the_budget",),
    14: ("test_blocks.test_a_chunk_of_the_running_prompt_goes_before_a_new_request",),
    15: ("test_batching.test_what_is_left_of_the_budget_goes_to_the_next_request",),
    16: ("test_blocks.test_nobody_is_admitted_behind_a_prompt_that_stays_unfinished",),
    17: ("test_batching.test_decodes_wait_while_there_is_a_prompt_unless_batches_are_mixed",),
    18: ("test_batching.test_decodes_take_their_share_of_a_mixed_budget_first",),
    19: (
        "test_batching.test_no_more_requests_run_than_there_are_rows_and_rows_are_reused_in_turn",
    ),
    20: (
        "test_policy.test_requests_are_admitted_as_they_came_whatever_their_priority",
        "test_any_order_of_events.TestAnyOrderOfEvents",
    ),
    21: (
        "test_blocks."
        "test_rows_of_other_lengths_keep_their_columns_and_leave_holes_where_a_window_passed",
    ),
    22: ("test_batching.test_each_prompt_token_knows_the_next_one_and_the_last_of_a_prompt_none",),
    23: (
        "test_blocks.test_a_row_is_the_same_from_prompt_to_answer",
        "test_batching.test_no_more_requests_run_than_there_are_rows_and_rows_are_reused_in_turn",
    ),
    24: ("test_blocks.test_a_parent_that_is_used_in_part_is_filled_before_an_empty_one_is_cut",),
    25: ("test_blocks.test_a_parent_serves_another_group_only_after_its_last_block",),
    26: ("test_blocks.test_blocks_of_all_groups_are_taken_together_or_not_at_all",),
    27: (
        "test_blocks."
        "test_groups_that_pack_a_parent_differently_name_its_blocks_by_ids_of_their_own",
    ),
    28: ("test_blocks.test_groups_of_different_granularity_have_rows_of_their_own_lengths",),
    29: ("test_blocks.test_a_window_lets_go_of_a_block_in_the_plan_after_its_last_token_left",),
    30: ("test_blocks.test_a_window_within_a_block_holds_two_blocks_at_most",),
    31: ("test_blocks.test_a_prompt_longer_than_the_pool_is_served_because_its_window_slides",),
    32: ("test_blocks.test_forty_decodes_in_a_small_window_pool_find_room",),
    33: ("test_blocks.test_a_reservation_gives_the_next_decode_of_its_request_room_and_no_other",),
    34: ("test_blocks.test_reserved_blocks_are_nobody_elses",),
    35: ("test_blocks.test_an_abort_gives_back_what_was_reserved",),
    36: (
        "test_batching.test_a_declared_budget_is_reserved_at_the_first_chunk",
        "test_blocks.test_a_declared_budget_is_reserved_up_to_4096_tokens",
    ),
    37: ("test_blocks.test_the_room_for_one_request_leaves_a_forward_in_flight_its_tokens",),
    38: ("test_prefixes.test_two_requests_of_one_prefix_hold_the_same_pages",),
    39: ("test_batching.test_a_cached_prefix_is_cut_by_its_cap_and_never_covers_a_prompt",),
    40: (
        "test_batching."
        "test_the_last_tokens_of_a_prompt_are_computed_again_when_they_are_to_be_replayed",
    ),
    41: ("test_batching.test_a_cached_prefix_is_cut_by_its_cap_and_never_covers_a_prompt",),
    42: ("test_prefixes.test_without_prefix_caching_nothing_is_found",),
    43: ("test_prefixes.test_an_answers_pages_are_found_by_the_next_turn_of_a_conversation",),
    44: (
        "test_prefixes.test_a_hit_that_ends_within_a_page_reads_a_copy_of_its_own",
        "test_host_tier.test_a_tail_is_loaded_to_its_readers_own_block_and_not_copied_there",
    ),
    45: ("test_prefixes.test_an_owner_moves_off_the_partial_page_that_others_may_share",),
    46: ("test_prefixes.test_a_window_is_hit_only_where_the_run_it_looks_back_on_is_cached",),
    47: ("test_prefixes.test_two_windows_agree_on_one_boundary_in_whichever_order_they_are_asked",),
    48: ("test_prefixes.test_whatever_was_cached_and_given_up_a_hit_is_warm_in_every_group",),
    49: (
        "test_state_groups."
        "test_the_third_request_of_a_prefix_hits_the_boundary_that_the_second_promoted",
    ),
    50: (
        "test_prefixes.test_the_prefix_that_was_used_longest_ago_goes_first",
        "test_prefixes.test_of_one_prefix_the_end_goes_before_the_start",
        "test_prefixes.test_a_hit_is_not_given_up_for_the_rest_of_its_own_prompt",
        "test_prefixes.test_no_more_is_given_up_than_is_needed",
    ),
    51: ("test_retraction.test_a_blocked_decode_suspends_the_request_that_frees_most",),
    52: ("test_retraction.test_a_suspended_request_comes_back_to_a_new_row_and_decodes_on",),
    53: (
        "test_retraction.test_without_a_place_for_the_image_the_newest_is_aborted_with_the_reason",
    ),
    54: ("test_retraction.test_a_request_with_results_outstanding_is_not_suspended",),
    55: ("test_retraction.test_a_suspended_request_that_ends_gives_its_image_back",),
    56: ("test_host_tier.test_nobody_is_suspended_while_a_store_under_way_will_free_the_room",),
    57: (
        "test_host_tier."
        "test_a_prompts_pages_are_stored_from_pinned_blocks_and_findable_after_the_acknowledgment",
    ),
    58: (
        "test_host_tier.test_pages_are_not_stored_twice_neither_kept_nor_under_way",
        "test_host_tier.test_a_full_tier_drops_what_it_has_no_place_for",
        "test_host_tier."
        "test_pages_that_nobody_asked_for_are_replaced_before_those_that_were_matched",
    ),
    59: (
        "test_host_tier.test_a_host_hit_is_loaded_by_the_plan_whose_forward_reads_it",
        "test_host_tier.test_a_load_holds_both_ends_until_its_acknowledgment_whoever_leaves",
    ),
    60: ("test_host_tier.test_a_second_or_unknown_acknowledgment_changes_nothing",),
    61: ("test_host_tier.test_ids_of_operations_are_counted_over_all_kinds",),
    62: (
        "test_peers.test_chunks_are_computed_before_anything_is_handed_over",
        "test_peers.test_a_prompt_is_handed_over_with_its_first_token_once_its_result_is_there",
        "test_peers.test_pages_stay_until_the_peer_has_them_and_are_cached_then",
    ),
    63: (
        "test_peers.test_a_prompt_gets_all_its_blocks_at_once_and_costs_the_forward_nothing",
        "test_peers.test_a_window_group_gets_the_blocks_that_the_first_decode_looks_back_on",
        "test_peers.test_the_first_decode_feeds_the_token_that_came_with_the_prompt",
    ),
    64: (
        "test_peers.test_a_prompt_without_a_first_token_is_an_error",
        "test_peers.test_a_late_or_repeated_arrival_changes_nothing",
    ),
    65: ("test_peers.test_a_failed_transfer_ends_the_request_in_any_state",),
    66: (
        "test_storage.test_a_prompt_in_storage_is_asked_for_read_loaded_and_not_computed",
        "test_storage.test_pages_that_reach_host_memory_are_stored_once",
    ),
    67: ("test_storage.test_only_the_leading_run_of_what_was_found_is_read",),
    68: ("test_storage.test_a_request_that_waited_long_enough_is_admitted_without_storage",),
    69: ("test_storage.test_the_gate_closes_at_the_high_mark_and_opens_at_the_low_one",),
    70: ("test_storage.test_memory_is_quarantined_until_its_worker_is_known_to_be_done",),
    71: ("test_storage.test_a_frozen_tick_leaves_no_forward_and_lets_cancels_through",),
    72: (
        "test_kv_events."
        "test_a_page_is_stored_once_every_group_has_it_and_removed_with_the_first_that_goes",
    ),
    73: ("test_kv_events.test_evicted_and_cached_again_between_two_drains_is_no_event",),
    74: (
        "test_batching.test_clearing_waits_for_cached_pages_that_are_held",
        "test_host_tier.test_clearing_the_device_keeps_the_tier_and_clearing_all_does_not",
    ),
}
