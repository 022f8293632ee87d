"""The contract as functions: each takes a `Maker` and raises an AssertionError that says what went wrong."""

from typing import NamedTuple

from attnzoo.testing.checks import declared, decoding, graphs, masks, numbers, padding, randomness, sizes, state
from attnzoo.testing.probes import Check


class Promise(NamedTuple):
    """What every variant promises, in words and as checks."""

    title: str
    text: str
    checks: tuple[Check, ...]


PROMISES = (
    Promise(
        "1. True means may look",
        "Masks are bool, or whole numbers as tokenizers give them, non-zero for True. A float mask has two "
        "readings, so it is refused.",
        (
            masks.check_true_means_may_look,
            masks.check_whole_numbers_are_masks,
            masks.check_float_masks_are_refused,
        ),
    ),
    Promise(
        "2. Meaning depends on the argument, never on sizes",
        "`key_mask` is [b, k]; `mask` is [q, k], or 4-D and broadcasts to [b, h, q, k]. Any other shape is "
        "refused with the right one named, also where sizes happen to be equal.",
        (
            masks.check_other_mask_shapes_are_refused,
            masks.check_equal_sizes_change_no_meaning,
        ),
    ),
    Promise(
        "3. Pattern and key_mask and mask and documents",
        "A query may look at what all of them allow, in every combination and on every path: with dropout, "
        "checkpointed, under autocast, in any batch, with a cache.",
        (
            masks.check_masks_combine,
            masks.check_masks_broadcast,
            masks.check_sequences_are_alone,
            masks.check_gradient_mode_changes_nothing,
            masks.check_hidden_keys_have_no_weight,
            masks.check_gradients_go_where_queries_look,
        ),
    ),
    Promise(
        "4. A query that may look at nothing gets zero",
        "It gets zero from the attention, before the output projection, and gives zero gradients: no NaN, and "
        "no mean of the values.",
        (
            masks.check_queries_that_see_nothing_get_zero,
            masks.check_queries_that_see_nothing_give_no_gradient,
            masks.check_queries_that_see_nothing_harm_no_other,
        ),
    ),
    Promise(
        "5. Padding cannot be felt",
        "Tokens that `key_mask` hides become zero before every projection, so that whatever they hold changes "
        "nothing that is visible. A sequence gives the same alone and padded.",
        (
            padding.check_padding_cannot_be_felt,
            padding.check_padding_gets_no_gradient,
            padding.check_padding_in_half_precision_cannot_be_felt,
            padding.check_padding_of_context_cannot_be_felt,
            padding.check_padding_on_the_right_changes_nothing,
            padding.check_padding_on_the_left_changes_nothing,
            padding.check_padding_of_context_changes_nothing,
        ),
    ),
    Promise(
        "6. Aligned to the end",
        "Query i of q stands at position i + (k - q), for causality and for every pattern.",
        (padding.check_queries_stand_at_the_end,),
    ),
    Promise(
        "7. The output is what the pattern says",
        "Output and gradients equal dense attention over the visible keys in float64, and in lower precision "
        "are at most twice as far from it as a plain implementation.",
        (
            numbers.check_output_is_what_the_pattern_says,
            numbers.check_gradients_are_those_of_the_pattern,
            numbers.check_cross_attention,
            numbers.check_documents_are_alone,
            numbers.check_marked_tokens_may_be_none_all_or_hidden,
            numbers.check_weights_are_those_of_the_pattern,
            sizes.check_fewer_key_value_heads,
            sizes.check_lower_precision,
            sizes.check_gradients_in_lower_precision,
        ),
    ),
    Promise(
        "8. Nothing leaks",
        "Under causal, later tokens change no earlier output, and get no gradient from it.",
        (
            numbers.check_later_tokens_change_nothing,
            numbers.check_later_tokens_get_no_gradient,
        ),
    ),
    Promise(
        "9. Cached decoding equals the full pass",
        "However a sequence is cut into pieces. A cache counts every token, keeps hidden ones hidden, can be "
        "cropped, reset and reordered, and is left as it was by a call that is refused. Where the pattern looks back a "
        "bounded way it keeps the first tokens that all see, the window, `rewind` more, and marked tokens.",
        (
            decoding.check_cached_equals_full,
            decoding.check_cached_with_masks,
            decoding.check_cached_masks_may_change,
            decoding.check_hidden_tokens_stay_hidden,
            decoding.check_padded_prompts_decode_as_alone,
            decoding.check_refused_calls_change_no_cache,
            decoding.check_crop_and_reset,
            decoding.check_reorder,
            decoding.check_cached_far_beyond_the_window,
            decoding.check_marked_tokens_are_kept,
            decoding.check_a_window_bounds_its_cache,
            decoding.check_crop_beyond_rewind_is_refused,
            decoding.check_cached_keys_are_detached,
            decoding.check_queries_train_over_frozen_keys,
            decoding.check_caches_do_not_mix,
            decoding.check_unused_places_of_a_cache_are_not_felt,
            decoding.check_cached_in_any_dtype,
        ),
    ),
    Promise(
        "10. Random patterns are fixed by their seed",
        "They are the same at every call, at every length and in every module, and no global random state is "
        "read or advanced. Only a pattern that is to be drawn anew in training differs.",
        (
            randomness.check_patterns_are_fixed,
            randomness.check_random_state_is_left_alone,
            randomness.check_redrawn_patterns,
            randomness.check_training_changes_no_pattern,
        ),
    ),
    Promise(
        "11. Dropout only in training",
        "And then it is there, keeps the mean, and drops the same in backward.",
        (
            randomness.check_dropout_is_for_training,
            randomness.check_dropout_keeps_the_mean,
            randomness.check_dropout_is_the_same_in_backward,
        ),
    ),
    Promise(
        "12. Any size",
        "One token, lengths that no block divides, an empty batch, one head, inputs in any memory layout.",
        (
            sizes.check_any_length,
            sizes.check_gradients_at_any_length,
            sizes.check_empty_batch,
            sizes.check_one_of_everything,
            sizes.check_inputs_in_any_layout,
        ),
    ),
    Promise(
        "13. Any dtype",
        "float64, float32, bfloat16 and float16, with a softmax of float32 at least; the output has the dtype "
        "of the input, or of autocast.",
        (
            sizes.check_softmax_is_wide,
            sizes.check_large_scores_stay_finite,
            sizes.check_dtype_is_kept,
            sizes.check_default_dtype_plays_no_part,
        ),
    ),
    Promise(
        "14. Nothing sticks",
        "No call changes how a later one computes, and none leaves a tensor on the module or changes its inputs.",
        (
            state.check_calls_change_no_later_call,
            state.check_no_tensor_is_kept,
            state.check_inference_mode_does_not_stick,
            state.check_moving_does_not_stick,
            state.check_inputs_are_not_modified,
        ),
    ),
    Promise(
        "15. Travels well",
        "State dicts, copies, pickles, dtypes, gradient checkpointing, `torch.compile`, `torch.export` and "
        "`torch.func`.",
        (
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
    ),
    Promise(
        "Bad options are refused",
        "When the module is built, with a message that names them.",
        (
            declared.check_impossible_heads_are_refused,
            declared.check_impossible_options_are_refused,
        ),
    ),
    Promise(
        "What is declared is so",
        "What a variant supports works, and what it does without it refuses; `attnzoo list --supports`, "
        "`describe` and the errors have it from the same place.",
        (
            declared.check_causal_is_what_was_asked_for,
            declared.check_features_are_what_is_declared,
        ),
    ),
)
CHECKS: dict[str, Check] = {check.__name__: check for promise in PROMISES for check in promise.checks}
