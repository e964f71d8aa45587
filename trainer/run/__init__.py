"""Training runs, in the order of their life.

`train.train_run` makes the calls. Each of its stages is a module:

1. `run`: the request of a run, its context in this process, and its result.
2. `processes`: connect the processes of a run, compare them, and end them together.
3. `storage`: the folder or bucket of the run, its lock and its files.
4. `start`: open the checkpoint to start or resume from, with the adapters of LoRA.
5. `checks`: memory and disk space, before data is read.
6. `prepare`: the model, the tokens and the configuration of the loop.
7. `environment`: the machine and the versions, as the run records them.
8. `observe`, `run_status` and `summary`: output for the user. `metrics`: output to files and services.
9. `export`: exports of steps beside the training, and the upload of the last one.

`params`, `random_params` and `verbatim_params` load the arrays of a model without a run. `run_record` and
`bucket_record` read the metrics, samples and checkpoints of a run for its report.

`docs/explanation/a-training-run.md` follows one run through these modules.
"""
