"""The contract as functions: each takes a `Maker` and raises an AssertionError that says what went wrong."""

from attnzoo.testing.checks import declared, decoding, graphs, masks, numbers, padding, randomness, sizes, state
from attnzoo.testing.probes import Check

PROMISES: dict[str, tuple[Check, ...]] = {
    "1. True means may look": (
        masks.check_true_means_may_look,
        masks.check_whole_numbers_are_masks,
        masks.check_float_masks_are_refused,
    ),
    "2. Meaning depends on the argument, never on sizes": (
        masks.check_other_mask_shapes_are_refused,
        masks.check_equal_sizes_change_no_meaning,
    ),
    "3. Pattern and key_mask and mask and documents": (
        masks.check_masks_combine,
        masks.check_masks_broadcast,
        masks.check_masks_hold_under_dropout,
        masks.check_masks_hold_when_checkpointed,
        masks.check_masks_hold_under_autocast,
        masks.check_sequences_are_alone,
        masks.check_gradients_go_where_queries_look,
    ),
    "4. A query that may look at nothing gets zero": (
        masks.check_queries_that_see_nothing_get_zero,
        masks.check_queries_that_see_nothing_give_no_gradient,
        masks.check_queries_that_see_nothing_harm_no_other,
    ),
    "5. Padding cannot be felt": (
        padding.check_padding_cannot_be_felt,
        padding.check_padding_gets_no_gradient,
        padding.check_padding_in_half_precision_cannot_be_felt,
        padding.check_padding_of_context_cannot_be_felt,
        padding.check_padding_on_the_right_changes_nothing,
        padding.check_padding_on_the_left_changes_nothing,
        padding.check_padding_of_context_changes_nothing,
    ),
    "6. Aligned to the end": (padding.check_queries_stand_at_the_end,),
    "7. The output is what the pattern says": (
        numbers.check_output_is_what_the_pattern_says,
        numbers.check_gradients_are_those_of_the_pattern,
        numbers.check_positions_are_right_with_masks,
        numbers.check_cross_attention,
        numbers.check_documents_are_alone,
        numbers.check_weights_are_those_of_the_pattern,
        sizes.check_fewer_key_value_heads,
        sizes.check_lower_precision,
        sizes.check_gradients_in_lower_precision,
    ),
    "8. Nothing leaks": (
        numbers.check_later_tokens_change_nothing,
        numbers.check_later_tokens_get_no_gradient,
    ),
    "9. Cached decoding equals the full pass": (
        decoding.check_cached_equals_full,
        decoding.check_cached_with_masks,
        decoding.check_cached_masks_may_change,
        decoding.check_hidden_tokens_stay_hidden,
        decoding.check_padded_prompts_decode_as_alone,
        decoding.check_refused_calls_change_no_cache,
        decoding.check_crop_and_reset,
        decoding.check_reorder,
        decoding.check_cached_keys_are_detached,
        decoding.check_queries_train_over_frozen_keys,
        decoding.check_empty_cache_is_used,
        decoding.check_caches_do_not_mix,
        decoding.check_cached_in_any_dtype,
        declared.check_cache_is_refused_where_it_means_nothing,
    ),
    "10. Random patterns are fixed by their seed": (
        randomness.check_patterns_are_fixed,
        randomness.check_random_state_is_left_alone,
        randomness.check_redrawn_patterns,
        randomness.check_training_changes_no_pattern,
    ),
    "11. Dropout only in training": (
        randomness.check_dropout_is_for_training,
        randomness.check_dropout_keeps_the_mean,
        randomness.check_dropout_is_the_same_in_backward,
    ),
    "12. Any size": (
        sizes.check_any_length,
        sizes.check_gradients_at_any_length,
        sizes.check_empty_batch,
        sizes.check_one_of_everything,
        sizes.check_inputs_in_any_layout,
    ),
    "13. Any dtype": (
        sizes.check_softmax_is_wide,
        sizes.check_large_scores_stay_finite,
        sizes.check_dtype_is_kept,
    ),
    "14. Nothing sticks": (
        state.check_calls_change_no_later_call,
        state.check_no_tensor_is_kept,
        state.check_inference_mode_does_not_stick,
        state.check_moving_does_not_stick,
        state.check_meta_device_does_not_stick,
        state.check_inputs_are_not_modified,
    ),
    "15. Travels well": (
        state.check_state_dict_round_trip,
        state.check_other_layout_loads,
        state.check_copies_and_pickles,
        state.check_converts,
        state.check_gradient_checkpointing,
        state.check_every_parameter_learns,
        graphs.check_compiles,
        graphs.check_exports,
        graphs.check_samples_have_gradients_of_their_own,
    ),
    "Bad options are refused": (
        declared.check_impossible_heads_are_refused,
        declared.check_impossible_options_are_refused,
    ),
    "What is declared is so": (
        declared.check_causal_is_what_was_asked_for,
        declared.check_features_are_what_is_declared,
    ),
}
CHECKS: dict[str, Check] = {check.__name__: check for checks in PROMISES.values() for check in checks}
