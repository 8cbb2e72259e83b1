"""Faults that a tool of this kind could have, each as one exact replacement in one module, and the tests that must catch it."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """One fault: in `file`, `right` becomes `wrong`.

    Attributes:
        what: what is then wrong, in words.
        tests: ids of tests, at least one of which must fail.
    """

    name: str
    what: str
    file: str
    right: str
    wrong: str
    tests: tuple[str, ...]


def engine(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/test_cases_engine.py::test_{name}" for name in names)


def blocking(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/test_cases_blocking.py::test_{name}" for name in names)


def data(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/test_cases_data.py::test_{name}" for name in names)


A1 = engine("a1_a_head_is_a_slice_of_the_output_projections_input")
A3 = engine("a3_the_group_of_a_head_is_a_quotient_and_no_remainder")
A5 = engine("a5_heads_and_the_bias_once_sum_to_the_attention_block")
B1 = engine("b1_a_cached_token_equals_the_full_run_and_a_lone_one_does_not")
B3 = engine("b3_each_hook_fires_once_or_its_name_is_said")
D1 = blocking("d1_a_head_that_may_read_nothing_reads_itself_and_no_nan")
D3 = blocking("d3_blocked_before_softmax_rows_sum_to_one_and_zeroed_after_it_they_are_another_option")
D4 = blocking("d4_patterns_of_a_model_loaded_with_sdpa_are_there_and_margins_are_the_same")
F1 = blocking("f1_contexts_of_eighteen_and_seventeen_tokens_are_aligned_by_decision")
F2 = blocking("f2_nine_are_lost_by_attribution_and_by_exact_patch_alike")
F4 = blocking("f4_what_changes_nothing_is_exactly_zero")
E3 = data("e3_the_decision_token_is_the_one_that_stands_there")
E5 = data("e5_there_is_no_decision_at_a_token_that_all_labels_share")
E12 = data("e12_a_wrong_choice_has_a_negative_margin_and_its_competitor_stays")
G1 = data("g1_the_observed_value_counts_among_its_nulls", "g1_a_p_value_counts_what_reaches_it")
G4 = data("g4_ties_come_in_layer_and_head_order_and_are_reported", "g4_a_top_k_is_the_head_of_every_longer_one")
H1 = data("h1_offsets_that_a_tokenizer_leaves_empty_are_rebuilt")
H2 = data("h2_the_space_before_a_code_is_not_yet_the_code")
H4 = data("h4_line_ends_are_kept_as_they_are", "h4_a_span_that_does_not_hold_its_text_is_rejected_and_counted")
I3 = data("i3_the_distance_is_of_teacher_to_student_in_nats_over_groups")
J1 = data("j1_codes_are_text_and_one_counts_once_in_an_admission")
J3 = data("j3_codes_that_are_no_leaf_or_unknown_stay_and_are_flagged")
J4 = data("j4_the_padded_seventh_character_and_the_edition_in_every_output")
J5 = data("j5_a_code_is_the_same_however_it_is_written_and_never_cut")
ESCAPED = ("tests/test_report.py::test_whatever_comes_from_a_file_is_escaped_wherever_it_stands",)
ORACLE = ("tests/test_engine.py::test_every_head_at_several_positions_equals_the_oracle",)

FAULTS = (
    # scores
    Fault("zero scorer", "every effect is 0", "ablation.py", "(found[:, :1] - found[:, 2:])", "0 * (found[:, :1] - found[:, 2:])", F2),
    Fault("sign of the effect", "ablated minus clean", "ablation.py", "(found[:, :1] - found[:, 2:])", "(found[:, 2:] - found[:, :1])", F2),
    Fault("swapped heads", "heads are numbered from the other end", "heads.py", "mask[layer, head] = True", "mask[layer, n_heads - 1 - head] = True", A1),
    Fault("scores by another head", "head and layer change places in a table of effects", "heads.py", "np.unravel_index(i, mean.shape)", "np.unravel_index(i, mean.shape[::-1])[::-1]", ("tests/test_heads.py::test_swapped_layer_and_head_are_told_apart",)),
    Fault("unfrozen competitor", "the competitor is the strongest after the intervention", "margin.py", "(others[..., 0] if len(self.against) == 1 else",
          "(logits.index_fill(-1, torch.tensor([self.chosen]), -torch.inf).amax(-1) if len(self.against) == 1 else", E12),
    Fault("raw logit for a margin", "the chosen token's logit alone", "margin.py", "- (others[..., 0] if", "- 0 * (others[..., 0] if", data("e11_folded_and_centred_weights_move_logits_and_no_margin")),
    Fault("an option that is read and not used", "rule= changes nothing", "ablation.py", "(event_margin(reading, event, rule),)", "(event_margin(reading, event),)",
          engine("b2_every_public_option_changes_the_result_and_an_unknown_one_is_an_error")),
    Fault("attribution without a reference", "gradient times z", "attribution.py", "(gradient * (z - zbar))", "(gradient * z)", F2),
    Fault("gradient of another coordinate", "a gradient is multiplied with the next coordinate of z", "attribution.py", "gradient[pack, layer], z[pack, layer] = grad, value", "gradient[pack, layer], z[pack, layer] = grad.roll(1, -1), value",
          engine("b6_gradients_equal_central_differences")),
    Fault("a mean over one more event", "the sum is divided by one event too many", "ablation.py", "counts.get(event.kind, 0) + 1", "counts.get(event.kind, 1) + 1", blocking("c3_a_mean_counts_events_and_nothing_else")),
    Fault("a leaked split", "a reference transcript is scored", "ablation.py", "if event.transcript in self.transcripts:", "if False:", ("tests/test_ablation.py::test_a_reference_transcript_may_not_be_scored",)),
    Fault("margin in sixteen bits", "the model's own last projection, rounded", "_unembed.py", "if not self.sixteen_bit or not hidden:", "if True:", data("e9_sixteen_bits_do_not_round_a_margin_away")),
    # hooks, rows, positions
    Fault("rows see each other", "a packed row reads the rows before it", "_hooked.py", "own[None] == rows.branch[:, None])", "own[None] >= 0)", ORACLE),
    Fault("a row at the wrong position", "rows stand one further on", "_hooked.py", "way.forward(rows.tokens[None], rows.positions[None],", "way.forward(rows.tokens[None], rows.positions[None] + 1,",
          blocking("c1_pads_on_either_side_move_no_margin")),
    Fault("a row that takes another for its own", "rows that enter late take the first row of the pack for their clean twin", "branches.py", "tuple(parents.get(p, 0) for p in positions)", "tuple(0 for p in positions)", ORACLE),
    Fault("cache dropped", "the renamed cache argument is not filled in", "_ways.py", 'and kwargs.get("cache") is not None:', 'and kwargs.get("cache") is None:', B1),
    Fault("hooks left behind", "hooks stay where a forward raised", "_ways.py", "stack.callback(point(layer, counted).remove)", "handle = point(layer, counted); stack.push(lambda kind, *_: handle.remove() if kind is None else None)",
          engine("b4_after_a_hook_that_raised_the_next_forward_is_bitwise_the_first")),
    Fault("a hook that never fires", "how often a hook fired is not looked at", "_ways.py", "                if count != 1:", "                if False:", B3),
    Fault("hooks of others overlooked", "rows pass by a bridge that somebody edits", "_ways.py", "return any(not (getattr(hook", "return False and any(not (getattr(hook",
          ("tests/test_ablation.py::test_a_callers_own_hook_or_weight_on_the_bridge_is_noticed",)),
    Fault("group by remainder", "the group of a head is its remainder", "heads.py", "return head // (n_heads // n_kv_heads)", "return head % n_kv_heads", A3),
    Fault("values of another group", "values are taken from the remainder's group", "branches.py", "values[[h // group for h in heads], start:end]", "values[[h % len(values) for h in heads], start:end]", A3),
    Fault("an edit of the whole group", "one head's edit reaches its neighbour", "branches.py", "torch.where(share == 0, z[row], changed)", "torch.where((share == 0) & (share.roll(1, 1) == 0), z[row], values.expand_as(z[row]))",
          engine("a2_an_edit_of_one_query_head_changes_no_other")),
    Fault("values of another head", "a head gets what was meant for another", "branches.py", "values.expand_as(z[row]), share)", "values.expand_as(z[row]).flip(1), share)", F1),
    Fault("bias in every head", "b_O is added to each head's output", "_hooked.py", "return projection(spread.flatten(-2)) - self.output_bias(layer)", "return projection(spread.flatten(-2))", A5),
    Fault("identity not exact", "a donor's z is kept in sixteen bits", "branches.py", "torch.as_tensor(values[layer]).to(hooked.device, hooked.dtype),", "torch.as_tensor(values[layer]).bfloat16().to(hooked.device, hooked.dtype),", F4),
    Fault("donor of another position", "z is taken one token early", "branches.py", "branches = [Branch(position, ids=()) for position in positions]", "branches = [Branch(max(0, position - 1), ids=()) for position in positions]", F1),
    # blocking
    Fault("a block that blocks nothing", "the mask of blocked reads is dropped", "_hooked.py", "self.additive(visible & ~cut[:, :n, :length + n])", "self.additive(visible)", D3),
    Fault("a block of the own key", "a row may be left with nothing to read", "interventions.py", "(where >= self.start) & (where < self.end) & (where != own)", "(where >= self.start) & (where < self.end)", D1),
    Fault("a mask that is not low enough", "blocked scores are lowered by 1e5", "_hooked.py", "low = torch.finfo(self.dtype).min", "low = -1e5", blocking("d1_a_masked_key_weighs_nothing_however_large_the_scores")),
    Fault("zeroing that renormalises", "the span's weight is handed to the other keys", "branches.py", "(0 if instead is None else weight.sum(-1, keepdim=True) * instead) - given",
          "(z[row, heads] * weight.sum(-1, keepdim=True) if instead is None else weight.sum(-1, keepdim=True) * instead) - given", D3),
    Fault("patterns from sdpa", "the bridge is booted as the model was loaded", "model.py", '    model.set_attn_implementation("eager")\n    try:', "    try:",
          ("tests/test_self_test.py::test_the_bridge_keeps_eager_and_the_plain_copy_runs_sdpa_on_the_same_weights",)),
    # events
    Fault("off by one position", "an event stands at its own token", "events.py", "int(where[0]) + depth - 1", "int(where[0]) + depth", E3 + ("tests/test_events.py::test_region_label_and_positions",)),
    Fault("labels out of place", "labels are tokenized without the space before them", "labels.py", "LabelTrie.build(self, tokenizer, before, lead)", 'LabelTrie.build(self, tokenizer, before, "")', E3),
    Fault("a competitor counted twice", "labels are counted, not the tokens that they begin with", "margin.py", "ids = tuple(sorted(set(competitors) - {chosen}))", "ids = tuple(sorted(c for c in competitors if c != chosen))", E5),
    Fault("no end of a label", "a label that begins another may not end", "events.py", "(closers if t == END else (t,))", "(() if t == END else (t,))", data("e6_after_a_label_that_begins_another_it_may_end")),
    Fault("one alternative of many", "of all live tokens only the first is listed", "events.py", "alternatives = tuple(sorted({chosen, *ids(others)}))", "alternatives = tuple(sorted({chosen, *ids(others)[:1]}))",
          data("e6_alternatives_lead_to_whole_labels_and_never_from_one_path_to_another")),
    Fault("a second BOS", "BOS is added to chat text too", "transcripts.py", "add_special_tokens=not starts", "add_special_tokens=True", data("e1_a_tokenizer_that_adds_a_bos_of_its_own_adds_none_to_chat_text")),
    Fault("empty offsets taken", "offsets (s, s) are believed", "transcripts.py", "if offsets is None or _broken(", "if offsets is None or False and _broken(", H1),
    Fault("the space before a word", "a span that ends before a word holds the word", "transcripts.py", "np.maximum(begins, start)", "np.maximum(self.offsets[:, 0], start)", H2),
    # statistics
    Fault("signed p-value", "the wrong tail", "calibration.py", "return null >= observed - 1e-9", "return null <= observed + 1e-9", G1),
    Fault("p-value of zero", "the observed value is not counted", "calibration.py", "return (1 + int(reaches(", "return (0 + int(reaches(", G1),
    Fault("no correction", "max-T compares a head with itself alone", "calibration.py", "reaches(largest[:, None], observed[kind])", "reaches(r, observed[kind])",
          data("g3_heads_without_an_effect_are_rarely_found_and_without_correction_always")),
    Fault("max-T over one kind", "the largest statistic of the first kind alone", "calibration.py", "largest = np.max([r.max(-1) for r in drawn.values()], axis=0)", "largest = next(iter(drawn.values())).max(-1)",
          ("tests/test_calibration.py::test_max_t_runs_over_kinds_too",)),
    Fault("Benjamini-Hochberg without order", "p n / rank, not its running minimum", "calibration.py", "return multipletests(p_values, method=method)[1] if len(p_values) else p_values",
          "return np.minimum(1, p_values * len(p_values) / (1 + np.argsort(np.argsort(p_values)))) if len(p_values) else p_values", ("tests/test_calibration.py::test_q_values_equal_brute_force_and_keep_the_order_of_p_values",)),
    Fault("seed ignored", "permutations are those of seed 0", "calibration.py", "    rng = np.random.default_rng(seed)\n    contrasts", "    rng = np.random.default_rng(0)\n    contrasts", ("tests/test_calibration.py::test_order_of_sets_and_seed",)),
    Fault("splits without a seed", "every seed splits alike", "survey.py", 'f"{seed}:{name}"', 'f"{name}"', ("tests/test_discovery.py::test_splits_are_disjoint_seeded_and_keep_groups_together",)),
    Fault("ties from behind", "ties in reverse order", "heads.py", 'order = np.argsort(-mean.ravel(), kind="stable")', 'order = np.argsort(mean.ravel(), kind="stable")[::-1]', G4),
    # evidence, distillation, codes
    Fault("evidence that was cut", "truncated evidence is measured", "evidence/texts.py", "if s.name == EVIDENCE and s.end > len(kept.note)", "if False", data("h6_evidence_beyond_the_limit_is_truncated_and_a_cut_answer_refused")),
    Fault("a span that does not match", "a span's text is not held against the note", "corpora/notes.py", 'elif span.get("text") is not None and span["text"] != note[start:end]:', "elif False:", H4),
    Fault("ids of another tokenizer", "ids that do not decode to the text are taken", "transcripts.py", "if tokenizer.decode(ids[lead:]) != text:", "if False:", data("i1_ids_of_another_tokenizer_are_refused_even_if_vocabularies_are_equally_large")),
    Fault("direction of KL", "student to teacher", "distillation/loss.py", "(p * (p.log() - q.log()))", "(q * (q.log() - p.log()))", I3),
    Fault("KL over groups", "a mean over groups", "distillation/loss.py", "(p * (p.log() - q.log())).sum(-1)", "(p * (p.log() - q.log())).mean(-1)", I3),
    Fault("codes as numbers", "a number is taken for a code", "corpora/icd10cm.py", "    if not isinstance(code, str):\n", "    code = str(code)\n    if not isinstance(code, str):\n", J1),
    Fault("a code counted twice", "a code twice in an admission counts twice", "corpora/mimic_iv.py", "elif code in before:", "elif False:", J1),
    Fault("codes without a flag", "what is no leaf passes for one", "corpora/icd10cm.py", '"not billable" if label in _table().descriptions', '"" if label in _table().descriptions', J3),
    Fault("no edition", "the record of a corpus does not say the edition", "corpora/prepare.py", '"edition": source,', '"edition": None,', J4),
    Fault("a code cut to fit", "what is not in the table loses its last character", "corpora/icd10cm.py", "return code if code in _table().descriptions else None",
          "return next((c for c in (code, code[:-1]) if c in _table().descriptions), None)", J5),
    # files and pages
    Fault("unescaped report", "findings go into the page as they are", "report_page.py", "{escape(line.strip())}", "{line.strip()}", ESCAPED),
    Fault("unescaped table", "cells go into the page as they are", "report_page.py", 'classes="all", escape=True)', 'classes="all", escape=False)', ESCAPED),
    Fault("unescaped warning", "warnings go into the page as they are", "report_page.py", "<p class=warning>{escape(note)}</p>", "<p class=warning>{note}</p>", ESCAPED),
    Fault("a digest cut short", "one character of a head set's digest is compared", "heads.py", 'if loaded.digest != record.get("digest"):', 'if loaded.digest[:1] != str(record.get("digest"))[:1]:',
          ("tests/test_heads.py::test_every_other_set_is_a_changed_one",)),
    Fault("a stale part accepted", "a folder of other inputs is continued", "run_folder.py", "if before != now:", "if False:", ("tests/test_run_folder.py::test_a_folder_belongs_to_its_inputs",)),
    Fault("a torn part accepted", "parts are written in place", "run_folder.py", "        os.replace(beside, path)\n    except", "        path.write_bytes(beside.read_bytes())\n    except", ("tests/test_run_folder.py::test_a_failed_write_leaves_the_old_file",)),
)
