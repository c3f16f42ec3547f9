"""The formats of the JSON of autoplans, apart from what writes it: a command that reads one needs no planner."""

from shardrules.core.storage.records import Format

AUTOPLAN = Format("shardrules_autoplan", 2, "an autoplan report")

TRAINING_PLAN = Format("shardrules_train_plan", 2, "a training plan")
