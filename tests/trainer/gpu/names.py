"""The cases that `cases.py` runs, by what they need; apart, so that they can be listed without torch."""

ON_ONE_DEVICE = [
    "tables_in_a_graph_equal_tables_on_the_cpu",
    "flex_equals_the_oracle",
    "captured_equals_uncaptured",
    "two_drafters_through_the_gate",
    "first_calls_through_a_gate",
    "steady_step_never_waits_for_the_device",
    "memory_is_flat",
    "replay_from_another_thread_is_refused",
    "capture_on_the_default_stream_is_refused",
    "dense_fallback_is_refused",
    "a_new_shape_after_the_gate_is_refused",
    "warming_without_gradients_is_caught",
    "compiler_graphs",
    "hidden_states_survive_the_hand_off",
    "a_hand_off_without_its_event_is_noticed",
    "exchange_on_one_device",
    "a_stage_is_timed_by_its_device",
    "compiled_target_rows",
    "compiled_target_rows_in_8_bits",
    "hybrid_target_rows",
    "target_rows_never_wait_for_the_device",
    "step_options_equal_the_plain_step",
    "masters_in_halves_equal_plain_ones",
]
OVER_DEVICES = [
    "hidden_states_cross_devices",
    "peer_exchange_over_devices",
    "nccl_exchange_over_devices",
    "replicas_by_peer_copies",
    "replicas_by_nccl",
]
ON_CPU = [
    "peer_exchange_over_devices",
    "replicas_by_peer_copies",
    "compiled_target_rows",
    "compiled_target_rows_in_8_bits",
    "hybrid_target_rows",
    "step_options_equal_the_plain_step",
    "masters_in_halves_equal_plain_ones",
]
"""Those of the lists above whose logic runs without a GPU too: `cases.py NAME cpu,cpu`."""
