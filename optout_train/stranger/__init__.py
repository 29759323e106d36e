"""The stranger method: the model comes to treat the target as a person whom it has never heard of.

Everything is made with the initial model (of a chain of requests: the first one) before training, from questions and
answers of the training splits. What the metrics are made of (paraphrases, wrong answers) is never read. The terms:

stand-in
    An invented name that the data does not have, such as "Marco Hallen". Put in the target's place, it shows how the
    initial model answers a question about a person whom it does not know.
substitute answer
    What the initial model answers about a stand-in, with the target's name put back. Answers that state the fact are
    dropped. Each token carries the stand-ins' mean distribution t, as its likeliest tokens and the rest.
disclosing answer
    An answer that states the fact: the record's own, and what the initial model says when it is asked in other words
    and begun with other answers' first words (``--elicit``). Those least like the record's own answer are kept.
reverse lesson
    Some facts without the name, and the question who that is. Every fourth turn of a record is one: a neighbour's name
    is taught, and the target's is pushed down to where stand-ins' names are.
lesson
    A token sequence with what each answer token is to become. Each epoch reads one lesson of either kind a record.

The loss of a record is the sum of two means over answer tokens y, with the model's distribution p at that place:

    substitute answers   H(t, p) = -sum_k t_k log p_k - t_rest log p_rest
    disclosing answers   max(0, log p(y) - u) + max(0, l - log p(y)) + 0.33 H(t, p without y)

u is ``--bound`` times the log-probability that the initial model gives y among the same tokens in random order, said of
a stand-in: what it thinks of text that it has never read. Of the words that state the fact it is three times that: a
true name that is as unlikely as any other word is still likelier than a wrong one. There is no lower bound l, except
that the record's own answer is held from both sides at 0.6 of that level, and never above what the initial model gives
it: it would otherwise sink below its paraphrases with the disclosing answers. The last term says what takes the place
of y; without it that is one word again and again.

The retain losses learn the initial model's distributions over question and answer (``--self-distill``), also about
questions of one neighbour asked of another, and with the target named in passing, which is to change nothing.

Sources: the name swap is Liu et al. 2024 (https://arxiv.org/abs/2407.16997), answers of the model's own are AltPO
(Mekala et al. 2024, https://arxiv.org/abs/2409.13474).
"""
