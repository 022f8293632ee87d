"""The contract can fail: every mutant is caught, and every check is needed to catch one."""

import pytest

import attnzoo
from attnzoo.errors import OptionError
from attnzoo.testing import CHECKS
from tests.mutants.matrix import MUTANTS, failing, only
from tests.mutants.sound import Linear, Sound, TopKeys


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(name):
    mutant = MUTANTS[name]
    if mutant.witness is None:
        assert mutant.caught
        assert failing(mutant, mutant.caught) == set(mutant.caught)
    else:
        mutant.witness()
        with mutant.made(), pytest.raises(AssertionError):
            mutant.witness()


def test_each_check_is_needed():
    assert {check for mutant in MUTANTS.values() for check in mutant.caught} == set(CHECKS)
    witnessed = [name for name, mutant in MUTANTS.items() if mutant.witness]
    assert len(MUTANTS) >= 40
    assert len(witnessed) <= 0.05 * len(MUTANTS)


@pytest.mark.usefixtures("without_annotations")
@pytest.mark.parametrize("variant", [TopKeys, Linear])
def test_a_sound_variant_passes_whatever_it_looks_at_and_computes(variant):
    attnzoo.testing.check_variant(variant)


def test_expected_failures_are_strict():
    reason = {"check_output_is_what_the_pattern_says": "it has no scale"}
    broken = MUTANTS["NoScale"].variant
    with only(*reason):
        attnzoo.testing.check_variant(broken, reason)
        with pytest.raises(AssertionError, match="expected to fail"):
            attnzoo.testing.check_variant(Sound, reason)
    both = only(*reason, "check_gradients_are_those_of_the_pattern")
    with both, pytest.raises(AssertionError, match="check_gradients_are_those"):
        attnzoo.testing.check_variant(broken, reason)
    with pytest.raises(OptionError, match="did you mean 'check_any_length'"):
        attnzoo.testing.check_variant(Sound, {"check_any_lengths": "a slip"})


def test_a_check_is_a_function_that_anybody_can_call():
    check: Check = CHECKS["check_any_length"]
    with pytest.raises(AssertionError, match="tokens"):
        check(attnzoo.testing.Maker(MUTANTS["LastTokenCutOff"].variant, {}, False))
