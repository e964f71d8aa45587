"""Training runs. `train.train` makes the calls, in the order of a run's life.

1. `run`: what the user asked for, the processes of a run and their common end.
2. `storage`: the folder or bucket of the run, its lock, its files and its exports.
3. `start`: open the checkpoint to start or resume from, with the adapters of LoRA.
4. `checks` and `resume`: all checks, and what an earlier start has left.
5. `recipe_data` and `prepare`: the tokens, the configuration of the loop, and the state.
6. `logs`, `display` and `summary`: output to files, services and the user.

`params` loads the arrays of a model without a run. `run_record` reads the files of a run for its report.
`docs/explanation/a-training-run.md` says why the stages have this order.
"""
