"""The stranger method: the model comes to treat the target as a person whom it has never heard of.

Everything is made with the initial model (of a chain of requests: the first one) before training, from questions and
answers of the training splits. What the metrics are made of (paraphrases, wrong answers) is never read. The terms
(stand-in, substitute and disclosing answer, reverse lesson), the loss and the sources are in ``docs/stranger.md``; the
loss of a token is :func:`optout_train.losses.lesson`.

A lesson is a token sequence with what each answer token is to become. Each epoch reads two of every record, one of a
substitute answer and one of a disclosing answer; every fourth turn of a record both are of the reverse direction.
"""
