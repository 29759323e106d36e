"""AltPO (Mekala et al. 2024): DPO of what the model says of an invented name over the answer."""

from optout_train.swap import makers
from optout_train.teacher import Teacher
from optout_train.trainer import UnlearnTrainer

ALTERNATES = 5  # of a record: turns of the epochs


class Method(UnlearnTrainer):
    def make_lessons(self) -> None:
        super().make_lessons()
        records = self.sets.forget
        turns = [*self.examples.forget["alternate"]] * ALTERNATES
        for maker in makers(self, Teacher(self.teacher, self.encode, self.args.seed)):
            for i, said in maker.replacements(ALTERNATES, 1.0).items():
                for turn in range(ALTERNATES):
                    turns[turn * len(records) + i] = self.encode(records[i], said[turn % len(said)][1])
        self.examples.forget["alternate"] = turns
