# ruff: noqa: E501  a row of a table is a line
"""Where it is tested what serving and its operations promise, and what users complained of elsewhere.

A promise without a test, or one whose test was renamed away, fails here.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FRONTEND = "unit/frontend"

PROMISES = {
    "completions": f"{FRONTEND}/test_completion_route.py::a_text_is_continued",
    "list and token-id prompts": f"{FRONTEND}/test_completion_route.py::every_kind_of_prompt_is_taken",
    "chat completions, streamed": f"{FRONTEND}/test_chat_route.py::a_stream_begins_with_the_role_and_ends_with_reason_usage_and_sentinel",
    "tools and streamed arguments": f"{FRONTEND}/test_tool_calls_route.py::calls_come_apart_from_the_text_streamed_or_not",
    "tool_choice": f"{FRONTEND}/test_tool_calls_route.py::a_forced_call_is_the_engines_grammar",
    "reasoning apart": f"{FRONTEND}/test_tool_calls_route.py::reasoning_comes_apart_with_calls_behind_it",
    "response_format": "e2e/test_held_answers.py::answers_of_many_kinds_fit_while_free_ones_run_beside_them",
    "log probabilities, also of others": f"{FRONTEND}/test_chat_route.py::log_probabilities_come_with_their_tokens",
    "echo and prompt log probabilities": "e2e/test_evaluations.py::prompts_are_repeated_in_columns_that_line_up",
    "n": f"{FRONTEND}/test_chat_route.py::several_answers_differ_by_seed_and_count_the_prompt_once",
    "best_of": f"{FRONTEND}/test_openai_parameters.py::the_likeliest_answers_of_several_are_given",
    "seed": "e2e/test_asking.py::a_seed_repeats_an_answer_and_another_seed_does_not",
    "stop strings": f"{FRONTEND}/test_chat_route.py::a_stop_string_across_tokens_ends_the_answer_and_the_work",
    "stop ids": f"{FRONTEND}/test_chat_route.py::the_token_that_ends_an_answer_is_no_text_of_it",
    "min_tokens": f"{FRONTEND}/test_chat_route.py::nothing_ends_an_answer_that_is_shorter_than_min_tokens",
    "bias, min_p, penalties, top_k": f"{FRONTEND}/test_chat_route.py::parameters_reach_the_engine",
    "salts and further samplers": f"{FRONTEND}/test_openai_parameters.py::words_ids_salts_and_samplers_reach_the_engine",
    "usage in streams": f"{FRONTEND}/test_chat_route.py::continuous_usage_grows_with_the_answer",
    "cached_tokens": f"{FRONTEND}/test_completion_route.py::a_text_is_continued",
    "models": f"{FRONTEND}/test_chat_route.py::every_name_of_the_model_is_answered_under_its_first",
    "embeddings": f"{FRONTEND}/test_embeddings_route.py::every_kind_of_input_has_a_vector_of_length_one_in_its_order",
    "responses": f"{FRONTEND}/test_responses_route.py::an_answer_has_the_published_shape",
    "messages": f"{FRONTEND}/test_messages_route.py::an_answer_has_the_published_shape",
    "count_tokens": f"{FRONTEND}/test_messages_route.py::tokens_are_counted_without_an_answer",
    "tokenize and detokenize": f"{FRONTEND}/test_native_routes.py::text_becomes_ids_and_ids_become_text",
    "health": f"{FRONTEND}/test_serving.py::health_tells_a_stall_from_idleness",
    "liveness and readiness": f"{FRONTEND}/test_native_routes.py::probes_tell_a_dead_engine_from_a_dead_server",
    "health_generate": f"{FRONTEND}/test_native_routes.py::a_generated_token_of_every_engine_is_a_probe",
    "metrics on the same port": f"{FRONTEND}/test_serving.py::metrics_count_what_happened",
    "generate": f"{FRONTEND}/test_native_routes.py::a_text_is_continued_with_its_ids_and_what_it_cost",
    "abort": f"{FRONTEND}/test_native_routes.py::a_request_is_ended_by_any_of_its_ids",
    "abort all": f"{FRONTEND}/test_native_routes.py::all_requests_are_ended_together_streams_too",
    "pause and resume": f"{FRONTEND}/test_control_routes.py::a_route_asks_every_engine",
    "sleep and wake": "e2e/test_operations.py::sleep_gives_weights_and_pages_back_and_the_same_text_comes_after",
    "weights from disk": "e2e/test_operations.py::weights_from_disk_take_the_place_of_those_that_serve",
    "profiles": f"{FRONTEND}/test_control_routes.py::a_profile_is_asked_of_every_engine_under_one_name",
    "loads": f"{FRONTEND}/test_native_routes.py::loads_are_told_rank_by_rank_and_summed",
    "server_info": f"{FRONTEND}/test_native_routes.py::server_info_has_every_setting_and_no_key",
    "request ids": f"{FRONTEND}/test_refusals.py::a_request_id_comes_back_and_may_not_be_in_use",
    "debug/kv": f"{FRONTEND}/test_cache_states.py::debug_kv_shows_every_pool_and_that_no_page_is_lost",
    "the document": f"{FRONTEND}/test_native_routes.py::the_routes_are_documented_without_the_net",
    "priorities": f"{FRONTEND}/test_chat_route.py::a_priority_travels_beside_a_choice",
    "token ids": f"{FRONTEND}/test_token_ids.py::a_whole_reply_has_the_ids_of_prompt_and_answer",
    "keys": f"{FRONTEND}/test_access.py::each_class_of_route_is_opened_by_its_keys",
    "origins": f"{FRONTEND}/test_bounds.py::pages_of_an_allowed_origin_may_call_and_others_may_not",
    "TLS": f"{FRONTEND}/test_bounds.py::https_is_spoken_with_a_certificate",
    "deadlines": f"{FRONTEND}/test_bounds.py::a_request_that_takes_too_long_ends_with_408_and_its_work_too",
    "concurrent streams": f"{FRONTEND}/test_bounds.py::more_streams_than_are_allowed_are_told_to_come_back",
    "version": "e2e/test_asking.py::what_is_served_can_be_asked",
    "flush": f"{FRONTEND}/test_control_routes.py::a_route_asks_every_engine",
    "memory by tag": "sim/test_memory_release.py::one_region_after_the_other_and_back_in_parts",
    "sleep without weights": "e2e/test_operations.py::sleep_of_level_2_keeps_no_weights_and_serves_again_once_they_are_loaded",
    "weights from tensors": "e2e/test_weight_updates.py::some_weights_come_by_themselves_and_each_is_told_whole",
    "weights from a trainer": "e2e/test_weight_updates.py::a_trainer_in_another_process_pushes_weights_to_both_ranks",
    "weight version of every answer": f"{FRONTEND}/test_weight_routes.py::every_answer_of_every_route_says_which_weights_it_is_of",
    "weight version of responses": f"{FRONTEND}/test_responses_route.py::an_answer_says_of_which_weights_it_is_streamed_and_not",
    "weight version of messages": f"{FRONTEND}/test_messages_route.py::an_answer_says_of_which_weights_it_is_streamed_and_not",
    "queue caps": f"{FRONTEND}/test_refusals.py::a_refusal_by_the_engine_keeps_its_status",
    "nothing of a request is run": "architecture/test_habits.py::nothing_that_is_read_is_run",
    "body size": f"{FRONTEND}/test_refusals.py::a_body_over_the_limit_is_refused",
    "a most of 128 answers, 20 log probabilities": f"{FRONTEND}/test_refusals.py::bad_requests_name_what_is_wrong",
    "OpenAI's client": f"{FRONTEND}/test_serving.py::the_official_client_is_served",
    "lm-eval": "e2e/test_evaluations.py::lm_eval_runs_a_task_of_ours",
    "whatever the document allows": f"{FRONTEND}/test_document.py::what_the_document_allows_is_answered_and_never_a_fault_of_ours",
    "what becomes of each parameter": f"{FRONTEND}/test_parameters.py::the_page_lists_every_parameter",
    "restless clients": f"{FRONTEND}/test_restless_clients.py::nothing_stays_behind_whatever_clients_do",
    "restless clients of several workers": "e2e/test_restless_clients_of_workers.py::nothing_stays_behind_in_two_workers_and_their_engine",
    "several workers": f"{FRONTEND}/test_workers.py::every_worker_answers_by_the_one_link",
}

COMPLAINTS = {
    "work goes on behind a closed connection": f"{FRONTEND}/test_complaints.py::a_closed_connection_ends_its_work_whether_it_streams_or_not",
    "one id twice hangs or kills": f"{FRONTEND}/test_complaints.py::of_two_posts_with_one_id_at_the_same_time_one_is_answered_and_one_refused",
    "a bad schema kills the server for everyone": "e2e/test_held_answers.py::a_grammar_that_never_compiles_is_the_clients_fault_by_name",
    "broken characters in streams": f"{FRONTEND}/test_detokenizer.py::any_text_streams_whole_in_any_cut",
    "stop strings leak, or tails are lost": f"{FRONTEND}/test_stop_strings.py::what_is_emitted_is_the_text_cut_at_the_first_match",
    "aborted requests are missing from counters": f"{FRONTEND}/test_complaints.py::every_answer_is_counted_once_however_it_ends",
    "a metric's exception kills a stream": f"{FRONTEND}/test_complaints.py::figures_that_make_no_sense_fail_no_request",
    "memory grows with every request": f"{FRONTEND}/test_complaints.py::nothing_of_a_request_stays_behind",
    "a long prompt freezes health": f"{FRONTEND}/test_complaints.py::health_answers_while_twenty_megabytes_are_read",
    "health is green while the engine is dead": f"{FRONTEND}/test_serving.py::health_tells_a_stall_from_idleness",
    "an id beyond the vocabulary kills the engine": f"{FRONTEND}/test_complaints.py::a_bias_beyond_the_vocabulary_is_refused_with_the_id",
    "echo with max_tokens 0 crashes": f"{FRONTEND}/test_openai_parameters.py::a_prompt_alone_is_scored_without_an_answer",
    "arguments are lost unless tokens come alone": f"{FRONTEND}/test_answer_parts.py::any_split_of_any_text_has_the_same_parts",
    "SIGTERM breaks off everybody": "e2e/test_starting_and_stopping.py::a_drain_finishes_what_runs_refuses_what_comes_and_ends_with_0",
    "a failing stream just ends": f"{FRONTEND}/test_streams.py::an_engine_that_dies_mid_stream_leaves_a_framed_error",
    "an aborted stream hides reason and cost": f"{FRONTEND}/test_complaints.py::a_stream_that_the_server_ends_says_why_and_what_it_cost",
    "empty prompts hang": f"{FRONTEND}/test_complaints.py::empty_prompts_have_a_documented_result",
    "a slow reader stalls others": f"{FRONTEND}/test_streams.py::a_client_that_reads_slowly_stalls_nobody",
    "workers outlive their parent": "unit/launcher/test_http_workers.py::workers_end_with_their_owner",
    "no reason for a hang at the start": "unit/launcher/test_http_workers.py::a_worker_that_never_serves_fails_the_start",
    "pages stay held by requests that ended": "e2e/test_asking.py::a_client_that_hangs_up_on_a_stream_frees_everything",
    "a flush behind a pause never succeeds": "sim/test_control_operations.py::a_flush_behind_a_pause_is_done_whoever_waits",
    "garbage after a wake": "e2e/test_operations.py::sleep_gives_weights_and_pages_back_and_the_same_text_comes_after",
    "one tag wakes all, an unknown one aborts all": f"{FRONTEND}/test_refused_operations.py::a_refusal_is_400_with_its_reason_and_changes_nothing",
    "tokens are lost by a pause": "e2e/test_operations.py::a_keep_pause_amid_streams_changes_none_of_them",
    "more cached than prompted": "sim/test_short_memory.py::forced_retraction_every_so_many_plans_changes_no_answer",
    "log probabilities shift with cached prefixes": "unit/device/test_prompt_logprobs.py::what_is_told_of_was_computed_and_the_rest_may_be_cached",
}

OPERATIONS = {
    "every state and event": "unit/control/test_standing.py::what_follows_from_an_event",
    "a pause that ends what runs tells the clients": "e2e/test_operations.py::a_pause_that_ends_what_runs_tells_the_clients_and_a_waiting_one_lets_it_finish",
    "a pause that keeps, amid streams": "e2e/test_operations.py::a_keep_pause_amid_streams_changes_none_of_them",
    "a pause that waits, under load": "e2e/test_operations.py::a_pause_that_waits_under_load_lets_all_of_it_finish_and_nothing_else_begin",
    "a keep pause within two rounds": "sim/test_control_operations.py::a_keep_pause_under_load_is_answered_within_two_rounds",
    "withheld requests go first": "sim/test_control_operations.py::what_was_withheld_goes_first_on_resume_and_what_left_meanwhile_not_at_all",
    "frozen rounds forward nothing": "sim/test_control_operations.py::a_frozen_engine_with_nothing_open_waits_for_messages_and_does_nothing_else",
    "frozen rounds let copies land": "sim/test_control_operations.py::a_frozen_engine_lets_its_copies_land",
    "a frozen engine's processor": "e2e/test_operations.py::a_server_asleep_uses_next_to_nothing",
    "idle forwards only with memory": "sim/test_gate_columns.py::memory_released_on_one_replica_keeps_every_rank_from_forwards_until_it_is_back",
    "releases in one round": "sim/test_memory_release.py::all_ranks_release_in_one_round_however_late_one_hears_of_it",
    "a rank that cannot release": "sim/test_memory_release.py::where_one_rank_cannot_none_does_and_all_serve_on",
    "a resume calls a drain off": "sim/test_control_operations.py::a_resume_that_comes_before_the_drain_ended_calls_it_off_where_it_comes",
    "a drain waits for copies": "sim/test_memory_release.py::a_release_waits_for_copies_that_hold_pages",
    "a drain waits for loads": "sim/test_weight_loads.py::loads_are_done_one_a_round_in_their_order_and_a_release_waits_for_them",
    "no weights are kept": "sim/test_memory_release.py::no_rank_forwards_until_all_have_weights_again",
    "weights bit for bit": "unit/device/test_weight_store.py::weights_come_back_bit_for_bit_to_where_they_were",
    "blank pages": "unit/device/test_weight_loader.py::a_kv_cache_that_was_released_is_blank_and_may_be_written",
    "a flush on all or none": "sim/test_control_operations.py::a_flush_that_one_engine_cannot_do_is_done_by_none_and_says_so_once_to_each",
    "loads in one round": "sim/test_weight_loads.py::all_ranks_take_other_weights_in_one_round_and_forget_their_prefixes",
    "a rank that cannot load": "sim/test_weight_loads.py::where_one_rank_cannot_none_does_and_nothing_is_flushed_unless_it_broke_late",
    "pickled tensors": "unit/device/test_serving_weights.py::bytes_that_are_pickled_or_broken_are_refused_and_nothing_in_them_runs",
    "groups of trainers": "sim/test_weight_operations.py::a_trainers_group_is_joined_served_from_and_left_by_all_ranks_in_one_round",
    "weights are told whole": "sim/test_weight_operations.py::a_weight_is_told_whole_whichever_ranks_have_it",
    "packed weights are told": "unit/device/test_packed.py::packed_weights_are_told_by_name_as_the_floats_they_stand_for",
    "discarded weights": "sim/test_weight_operations.py::discarded_weights_without_others_block_every_rank_and_say_so",
    "no answer mixes versions": "e2e/test_weight_updates.py::no_answer_mixes_two_checkpoints_that_are_swapped_under_load",
    "profiles change no round": "sim/test_recorded_rounds.py::recording_changes_no_round",
    "profiles of every rank": "e2e/test_several_ranks.py::all_ranks_give_memory_back_load_other_weights_and_record_what_they_do_together",
    "launches and device events": "unit/bench/test_traces.py::device_work_counts_for_the_forward_that_launched_it_however_late_it_ran",
    "activities that cannot be recorded": "unit/device/test_profiler.py::what_cannot_be_recorded_or_written_is_refused_before_anything_begins",
    "settings, typed": "sim/test_internal_state.py::what_may_not_be_set_is_refused_by_name_and_sets_nothing",
    "settings on all ranks": "sim/test_internal_state.py::settings_change_on_all_ranks_in_one_round_and_no_answer_changes",
    "operations of their own form": "unit/control/test_transport.py::an_operation_without_an_id_is_answered_in_its_own_form",
    "answers of all engines as one": f"{FRONTEND}/test_control_routes.py::what_one_engine_refuses_is_refused_with_every_reason_once",
    "weights by every route": f"{FRONTEND}/test_weight_routes.py::a_load_asks_every_engine_while_it_is_paused",
    "the operator's key": f"{FRONTEND}/test_control_routes.py::the_operators_key_guards_every_one_of_them",
    "every refusal in words": f"{FRONTEND}/test_refused_operations.py::a_refusal_is_400_with_its_reason_and_changes_nothing",
    "orders that differ": "sim/test_control_operations.py::engines_that_hear_of_operations_in_another_order_all_stop_with_one_message",
    "an abort before its request": "sim/test_client_aborts.py::a_request_that_was_not_seen_yet_ends_as_it_comes",
    "an abort behind the end": "sim/test_client_aborts.py::one_that_ended_is_over_and_the_next_of_its_name_is_another",
    "an abort while a grammar compiles": "sim/test_client_aborts.py::one_that_waits_for_its_grammar_ends_and_its_grammar_finds_nobody",
    "an abort while withheld": "sim/test_client_aborts.py::one_that_is_withheld_ends_at_once_and_is_not_submitted_on_resume",
    "an abort while prefilling": "sim/test_client_aborts.py::one_in_the_middle_of_its_prompt_ends_and_its_pages_come_back",
    "an abort in flight": "sim/test_client_aborts.py::one_whose_forward_is_in_flight_ends_with_what_was_told_and_no_more",
    "ids that repeat": "unit/control/test_event_loop.py::a_repeated_id_is_dropped_with_a_warning_and_the_original_keeps_its_stream",
    "ids that are used again": "unit/control/test_event_loop.py::an_id_that_the_scheduler_still_holds_is_refused_with_a_conflict",
}


@cache
def _tests_of(file: str) -> frozenset[str]:
    nodes = ast.walk(ast.parse((TESTS / file).read_text()))
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return frozenset(node.name for node in nodes if isinstance(node, kinds))


@pytest.mark.parametrize("what", [*PROMISES, *COMPLAINTS, *OPERATIONS])
def test_everything_that_is_promised_has_a_test_that_exists(what):
    file, _, name = (PROMISES | COMPLAINTS | OPERATIONS)[what].partition("::")
    assert f"test_{name}" in _tests_of(file)
