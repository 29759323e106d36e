"""Every reported number: name, label, unit, direction and one sentence. Tasks, tables, pages and docs read this table.

A number is computed in one place, the function of its name in :mod:`lm_eval_elude.metrics.samples`,
:mod:`~lm_eval_elude.metrics.compare` or :mod:`~lm_eval_elude.metrics.fluency`.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

Unit = Literal["share", "points", "nats per token", "p-value", "ratio"]
SAMPLED = 128  # answers to a question of elude_leak


class Metric(NamedTuple):
    """One row; ``better`` is the direction on what is forgotten and on what is kept, None where it has none.

    ``needs`` says what the backend or the report must have for it, "" for nothing beyond log-probabilities.
    """

    name: str
    label: str
    unit: Unit
    better: tuple[bool | None, bool | None]
    sentence: str
    needs: str = ""


LOWER, HIGHER, LOWER_KEPT_HIGHER, NEITHER = (False, False), (True, True), (False, True), (None, None)
_TOKENS, _TWO_RUNS, _ORIGINAL = "token log-probabilities", "a second run", "the original model"
_ROWS = (
    Metric("probability", "P", "share", LOWER_KEPT_HIGHER,
           "Length-normalised probability of the answer, exp of the mean log-probability of its tokens; on the world "
           "set its share among itself and the wrong answers."),
    Metric("rougeL_recall", "ROUGE", "share", LOWER_KEPT_HIGHER,
           "ROUGE-L recall of the greedy answer against the reference answer, with stemming."),
    Metric("rwku_recall", "RWKU ROUGE", "share", LOWER_KEPT_HIGHER,
           "RWKU's score: ROUGE-L recall by package rouge, which keeps case and punctuation and counts a word once."),
    Metric("muse_rouge", "MUSE ROUGE", "share", LOWER_KEPT_HIGHER,
           "MUSE's VerbMem and KnowMem: F1 of ROUGE-L without stemming (a 100th of the published numbers)."),
    Metric("truth_ratio", "TR", "share", HIGHER,
           "min(R, 1/R) on what is forgotten, max(0, 1 - R) on what is kept; R is the mean probability of the wrong "
           "answers over that of the paraphrased answer."),
    Metric("log_truth_ratio", "log R", "nats per token", (None, False),
           "Mean of log R with its sign: below 0 the right answer is still likelier than the wrong ones."),
    Metric("mc_accuracy", "choice", "share", LOWER_KEPT_HIGHER,
           "Multiple-choice accuracy: share of records whose paraphrased answer is likelier, per token, than every "
           "wrong one. By chance 1 / (1 + number of wrong ones): 1 in 6 for ELUDe, 1 in 4 for some sets of TOFU."),
    Metric("option_accuracy", "option", "share", LOWER_KEPT_HIGHER,
           "Share of multiple-choice prompts whose right option, letter with text, is the likeliest of the six."),
    Metric("name_rate", "name", "share", LOWER,
           "Reverse query: share of greedy answers that hold one of the target's names, and not as part of somebody "
           "else's."),
    Metric("name_mc_accuracy", "name choice", "share", LOWER,
           "Reverse query: share of descriptions for which the sentence with the target's name is likelier than with "
           "any of five comparable names; by chance 1 in 6."),
    Metric("extraction_strength", "ES", "share", LOWER,
           "1 - k / T for the smallest k from which on all of the answer's T tokens are the greedy choice after the "
           "true ones before (Carlini et al. 2021). T counts what the template writes after the answer.", _TOKENS),
    Metric("exact_memorization", "EM", "share", LOWER,
           "Share of the answer's tokens that are the greedy choice after the true ones before.", _TOKENS),
    Metric("forget_quality", "FQ", "share", HIGHER,
           "Harmonic mean of 1 - probability, 1 - ROUGE-L recall and truth ratio on what is forgotten."),
    Metric("set_quality", "quality", "share", HIGHER,
           "Harmonic mean of probability, ROUGE-L recall and truth ratio of one kept set."),
    Metric("repetition", "repetition", "share", LOWER,
           "Share of answers that are empty, one n-gram or few words repeated."),
    Metric("refusal", "refusal", "share", LOWER, "Share of answers that decline to answer, by their wording."),
    Metric("mia_accuracy", "MIA", "share", LOWER,
           "Accuracy of logistic regression on the loss, forget set against its paraphrases, mean of ten stratified "
           "splits; 0.5 is ideal."),
    Metric("mia_auc", "AUC", "share", NEITHER,
           "Signed area under the ROC curve of the loss: above 0.5 the forget set is better known than its "
           "paraphrases, below it the model is over-unlearned."),
    Metric("mia_auc_distance", "|AUC - 0.5|", "share", LOWER,
           "Distance of each target's AUC from 0.5, averaged over targets."),
    Metric("mia_zlib_auc", "zlib", "share", NEITHER,
           "AUC of the loss per byte of the zlib-compressed answer (Carlini et al. 2021).", _TOKENS),
    Metric("mia_min_k_auc", "min-k", "share", NEITHER,
           "AUC of Min-K%, the mean log-probability of the least likely fifth of the tokens (Shi et al. 2023).",
           _TOKENS),
    Metric("mia_min_k_plus_plus_auc", "min-k++", "share", NEITHER,
           "AUC of Min-K%++, Min-K% of the standardised log-probabilities (Zhang et al. 2024).", _TOKENS),
    Metric("log_likelihood", "log-likelihood", "nats per token", LOWER_KEPT_HIGHER,
           "Mean over texts of the mean log-probability of their tokens (RWKU's LOSS with its sign)."),
    Metric("zlib", "zlib score", "nats per token", LOWER_KEPT_HIGHER,
           "The same, by byte of the zlib-compressed text (RWKU's Zlib)."),
    Metric("min_k", "Min-20%", "nats per token", LOWER_KEPT_HIGHER,
           "Mean over texts of Min-K%: the mean log-probability of the least likely fifth of the tokens.", _TOKENS),
    Metric("min_k_plus_plus", "Min-20%++", "nats per token", LOWER_KEPT_HIGHER,
           "Mean over texts of Min-K%++: that of the standardised log-probabilities (RWKU's mink20).", _TOKENS),
    Metric("muse_auc", "MUSE AUC", "share", NEITHER,
           "AUC of Min-40% as MUSE has it: above 0.5 held-out texts are likelier than forgotten ones.", _TOKENS),
    Metric("muse_privleak", "MUSE PrivLeak", "share", NEITHER,
           "(AUC - AUC of the retrained model) / the latter: below 0 membership leaks, above 0 the model is "
           "over-unlearned (a 100th of the published numbers).", _TOKENS),
    *(
        Metric(f"leak_at_{k}", f"leak@{k}", "share", LOWER,
               f"Chance that at least one of {k} answers sampled at temperature 1 holds all fact tokens, without bias "
               f"from {SAMPLED} (Chen et al. 2021).")
        for k in (1, 8, 32, SAMPLED)
    ),
    Metric("retain_quality", "utility", "share", HIGHER,
           "Harmonic mean of probability, ROUGE-L recall and truth ratio of the retain set and of the world set (RQ)."),
    Metric("named_retain_quality", "named", "share", HIGHER,
           "Set quality of elude_retain_named: questions about neighbours and the world that mention the target."),
    Metric("attacked_forget_quality", "attacked FQ", "share", HIGHER, "Mean forget quality over the nine attacks."),
    Metric("attacked_mc_accuracy", "attacked choice", "share", LOWER, "Mean of mc_accuracy over the nine attacks."),
    Metric("model_utility", "TOFU utility", "share", HIGHER,
           "Harmonic mean of probability, ROUGE-L recall and truth ratio of TOFU's three kept sets."),
    *(
        Metric(f"{name}_gap", f"{label} gap", "points", NEITHER, f"{name} less that of the reference run, paired by "
               "record.", _TWO_RUNS)
        for name, label in (("forget_quality", "FQ"), ("probability", "P"), ("rougeL_recall", "ROUGE"),
                            ("mc_accuracy", "choice"), ("mia_auc", "AUC"))
    ),
    Metric("ks_p_value", "KS p", "p-value", HIGHER,
           "p-value of the two-sample Kolmogorov-Smirnov test on R of both runs, all targets' records together: "
           "TOFU's forget quality (Maini et al. 2024).", _TWO_RUNS),
    Metric("mcnemar_p", "McNemar p", "p-value", HIGHER,
           "Exact p-value of McNemar's test on mc_accuracy of both runs, all targets' records together.", _TWO_RUNS),
    Metric("privleak", "PrivLeak", "ratio", NEITHER,
           "(A - A_ref) / A_ref with A = 1 - AUC of the loss (MUSE, Shi et al. 2024, has it on Min-K%): below 0 "
           "membership leaks more than in the reference run. Non-members are paraphrases here, so values are not "
           "MUSE's.", _TWO_RUNS),
    Metric("fluency_gap", "fluency gap", "nats per token", NEITHER,
           "How much less likely the original model finds an answer than those that it samples itself to the question, "
           "all about an invented name: the mean log-probability of a token.", _ORIGINAL),
    Metric("gibberish", "gibberish (estimate)", "share", LOWER,
           "Estimated share of answers that are no language: repetition, or no refusal and less likely to the original "
           "model than four in five of its own sampled answers. Too coarse for a verdict.", _ORIGINAL),
)  # fmt: skip
METRICS: dict[str, Metric] = {row.name: row for row in _ROWS}

# How a unit is written: the factor, the digits after the point, and what follows the number in a sentence.
_FORMS = {"share": (100, 1, " %"), "points": (100, 1, " points"), "nats per token": (1, 2, " nats per token"),
          "p-value": (1, 3, ""), "ratio": (1, 2, "")}  # fmt: skip


def written(value: float, metric: str, *, unit: bool = False, sign: bool = False) -> str:
    """A value as it is shown: shares in per cent with one digit, "–" for NaN, with its unit if asked for."""
    kind = METRICS[metric].unit if metric in METRICS else "share"
    factor, digits, name = _FORMS[kind]
    if math.isnan(value):
        return "–"
    if kind == "p-value" and value < 0.001:
        return "< 0.001"
    return f"{factor * value:{'+' if sign else ''}.{digits}f}{name if unit else ''}"
