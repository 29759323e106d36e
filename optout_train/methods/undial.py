"""UNDIAL (Dong et al. 2024): distil the softmax of the model's own logits, at the true token lower by eta."""

from optout_train.teacher import Teacher, taught
from optout_train.trainer import UnlearnTrainer


class Method(UnlearnTrainer):
    def make_lessons(self) -> None:
        self.teach(self.args.eta)

    def teach(self, penalty: float) -> None:
        teacher = Teacher(self.model, self.encode, self.args.seed)
        samples = [self.encode(record) for record in self.sets.forget]
        lessons = []
        for sample, rows in zip(samples, teacher.log_probs(samples), strict=True):
            rows[range(len(rows)), sample.ids[sample.answer_start :]] -= penalty
            lessons.append(taught(sample, rows.softmax(1)))
        self.examples.forget["lesson"] = lessons
