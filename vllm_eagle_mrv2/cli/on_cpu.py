"""The message of every measuring command on a machine without a GPU."""

TIMES_MEAN_NOTHING = "On a CPU these times mean nothing; only the counts do."
