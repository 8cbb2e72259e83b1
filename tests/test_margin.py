from __future__ import annotations

import pytest
import torch

from decisionheads import Margin, fix_margin


def test_a_wrong_choice_has_a_negative_margin_against_the_best():  # E12
    clean = torch.tensor([3.0, 5.0, 4.0])
    margin = fix_margin(clean, 0, [1, 2])
    assert margin.against == (1,) and float(margin(clean)) == -2.0


def test_the_competitor_stays_when_an_intervention_makes_another_one_best():  # E12
    margin = fix_margin(torch.tensor([3.0, 5.0, 4.0]), 0, [1, 2])
    assert float(margin(torch.tensor([3.0, 0.0, 9.0]))) == 3.0


def test_swapping_negates():
    logits = torch.randn(5, 7)
    margin = Margin(2, (4,))
    assert torch.equal(margin(logits), -margin.swapped()(logits))


def test_rules_differ_where_they_must():  # B2
    clean = torch.tensor([1.0, 3.0, 2.5, 9.0])
    found = {rule: float(fix_margin(clean, 0, [1, 2], rule)(clean)) for rule in ("runner_up", "logsumexp", "vocabulary")}
    assert found["runner_up"] == -2.0 and found["vocabulary"] == -8.0
    assert found["logsumexp"] == pytest.approx(1 - float(torch.tensor([3.0, 2.5]).logsumexp(0)))
    with pytest.raises((ValueError, TypeError), match="best"):
        fix_margin(clean, 0, [1], "best")
    with pytest.raises(TypeError):
        fix_margin(clean, 0, [1], mode="best")


def test_margins_are_float32_even_of_sixteen_bit_logits():  # E9
    margin = Margin(0, (1,))
    assert margin(torch.tensor([20.10, 20.15])).item() == pytest.approx(-0.05, abs=1e-5)
    assert margin(torch.tensor([20.10, 20.15]).bfloat16()).dtype == torch.float32


def test_a_margin_needs_another_token():
    with pytest.raises(ValueError, match="no competitor"):
        fix_margin(torch.zeros(3), 0, [0])
    with pytest.raises(ValueError, match="other tokens"):
        Margin(1, (1,))


def test_competitors_count_once():  # E5
    assert fix_margin(torch.tensor([0.0, 1.0, 2.0]), 0, [1, 1, 2, 2], "logsumexp").against == (1, 2)


def test_the_runner_up_is_the_strongest_wherever_it_stands():
    for best in (1, 2, 3):
        clean = torch.zeros(4)
        clean[best] = 2.0
        assert fix_margin(clean, 0, [1, 2, 3]).against == (best,)
