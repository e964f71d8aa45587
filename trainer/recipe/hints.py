"""Hints for unknown keys and options: the recipe key of a similar name, or of a setting of another trainer.

The trainers are Hugging Face's Trainer and example scripts, EasyLM, llamabpt, redco, flaxlm, JAXSeq, torchtitan,
MaxText, Levanter and nanoGPT.
"""

from __future__ import annotations

from prepcli.core.errors import Key, text
from prepcli.core.formatting import suggest
from trainer.recipe.key_types import MAX_VALUE_CHARS
from trainer.recipe.tables import KEY_SCHEMAS, OPTIMIZER_SCHEMAS, TABLE_NAMES

# Recipe key, or what to do instead of a setting without a key, and the names of the setting in other trainers, in lower
# case with `_` instead of `-`. A plain name applies in every table, and `eval.interval` only in the table `eval`.
OTHER_NAMES_TEXT = r"""
name <- run_name experiment_name exp_name job_name project_name experiment_id
seed <- jax_seed data_seed random_seed rng_seed train_seed
mesh <- mesh_dim mesh_dims n_model_shards tensor_parallel_degree tensor_parallel_size tp_size
    data_parallel_shard_degree data_parallel_replicate_degree fsdp ici_fsdp_parallelism ici_tensor_parallelism
    n_devices num_devices devices mp_num data_mesh_shape fsdp_mesh_shape model_mesh_shape
model.preset <- load_llama_config load_gpt_config load_opt_config load_gptj_config size base_model
model.config <- config_name config_path model_config
model.overrides <- config_overrides update_llama_config update_gpt_config update_opt_config vocab_size hidden_size
    intermediate_size num_hidden_layers num_attention_heads num_key_value_heads rms_norm_eps initializer_range
    tie_word_embeddings bos_token_id eos_token_id n_embd n_layer n_head
model.path <- model model_name_or_path model_name pretrained_model_name_or_path checkpoint_path load_checkpoint
    load_parameters_path initial_load_path init_from initialize_from_hf hf_assets_path model_path init_ckpt_dir
    model.name model_load_mode model_load_path
model.dtype <- bf16 bfloat16 use_bf16 fp16 float16 dtype torch_dtype compute_dtype mixed_precision precision
    mixed_precision_param half_precision half_precision_backend fp16_opt_level
model.param_dtype <- params_dtype parameter_dtype weight_dtype master_dtype
model.scan_layers <- scan use_scan scan_blocks param_scan
model.remat_policy <- gradient_checkpointing use_gradient_checkpointing activation_checkpointing activation_checkpoint
    activation_checkpoint.mode remat remat_block remat_attention checkpoint_policy remat_mlp
    gradient_checkpointing_policy
model.offload <- enable_activation_offloading activation_offloading activation_offload decoder_layer_input
model.head_chunk_size <- loss_chunk_size scan_loss_chunk_size
model.ffn_chunk_size <- scan_mlp_chunk_size mlp_chunk_size scan_mlp
model.attention_kernel <- attn_implementation attention_type flash_attention_block_size attn_type scan_attention
model.q_chunk_size <- scan_query_chunk_size query_chunk_size
model.k_chunk_size <- scan_key_chunk_size key_chunk_size
model.rope_scaling <- rope_parameters
model.rope_theta <- rope_max_timescale rotary_emb_base rope_freq_base rope_base theta
model.dropout <- attn_pdrop resid_pdrop embd_pdrop attention_dropout residual_dropout resid_dropout residue_dropout
    hidden_dropout embedding_dropout embed_dropout dropout_rate use_dropout feedforward_dropout
model.fcm_ratio <- fcm_min_ratio fcm_max_ratio
data.type <- dataset_type data_type
data.path <- train_file train_files train_path train_data train_dir dataset dataset_name dataset_path data_path
    data_dir train_dataset train_dataset.path files json_dataset.path huggingface_dataset.path data_args.train.dataset
data.config <- dataset_config_name dataset_config dataset_subset huggingface_dataset.name data_args.train.dataset_name
    data_args.eval.dataset_name
data.split <- dataset_split train_split train_split_name dataset_train_split huggingface_dataset.split
data.eval_split <- eval_split_name validation_split_name dataset_test_split dataset_eval_split eval.dataset_split
    eval_dataset.huggingface_dataset.split
data.revision <- dataset_revision
data.sources <- datasets dataset_mixer data_mix mixture dataset_weights
data.bad_lines <- max_bad_lines on_bad_lines
data.max_document_bytes <- max_document_nbytes max_line_bytes max_bytes
data.fields <- text_column text_column_name dataset_text_field text_field text_key text_column_names fields column
    base64_token_dtype input_ids_column_name decoder_input_ids_column_name
data.format <- dataset_format chat_template prompt_format
data.add_bos <- add_bos_token prepend_bos
data.add_eos <- add_eos_token append_eos append_concat_token
data.max_examples <- max_train_samples max_samples num_samples limit_examples
data.source_length <- max_source_length max_src_len encoder_max_length max_input_length max_len
data.source_prefix <- prefix task_prefix decoder_prefix_str
data.tokenizer <- tokenizer_name tokenizer_path tokenizer_name_or_path vocab_file
data.seq_length <- block_size seq_len seq_length sequence_length max_length max_seq_length max_seq_len
    max_target_length max_tgt_len context_length context_size n_ctx decoder_max_length decoder_max_len
    max_output_length
data.packing <- packing_strategy group_texts sample_packing pack_sequences pad_to_max_length
data.objective <- task pretraining_objective denoising mlm
data.noise_density <- mlm_probability noise_ratio corruption_rate
data.mean_noise_span_length <- mean_span_length mean_length_of_spans
data.holdout <- validation_split validation_split_percentage val_split test_size eval_ratio
data.eval_path <- validation_file validation_files eval_file eval_data eval_dataset eval_dataset.path val_path
    val_file validation_path eval.path eval.dataset eval.dataset_name eval_dataset.json_dataset.path
    eval_dataset.huggingface_dataset.path
data.cache <- cache_dir dataset_cache_dir token_cache data_cache_dir
data.shuffle <- shuffle_data shuffle_dataset enable_data_shuffling
batch.size <- batch_size global_batch_size train_batch_size total_batch_size train_dataset.batch_size
    global_batch_size_to_train_on train_bsize
batch.per_device <- per_device_train_batch_size per_device_batch_size per_gpu_train_batch_size per_device_parallelism
    device_batch_size
batch.per_replica <- local_batch_size per_replica_batch_size micro_batch_size
batch.accumulate <- gradient_accumulation_steps accumulate_gradient_steps accumulate_grad_batches accumulation_steps
    grad_accum_steps gradient_accumulation grad_accum accumulate_steps
optimizer.type <- optim optimizer_name optimizer_type opt_type optimizer.name
optimizer.lr <- learning_rate lr peak_lr max_lr base_lr adam_lr learning_rate_init lr_init
optimizer.end_lr <- min_lr lr_end final_lr learning_rate_end min_learning_rate
optimizer.schedule <- lr_scheduler_type lr_scheduler lr_schedule scheduler learning_rate_schedule decay_type
    lr_schedule_type scheduler_type
optimizer.warmup_steps <- lr_warmup_steps num_warmup_steps warmup_iters warmup warmup_step n_warmup_steps
optimizer.warmup_ratio <- warmup_rate warmup_fraction warmup_steps_fraction lr_warmup_ratio
optimizer.decay_steps <- lr_decay_steps lr_decay_iters learning_rate_schedule_steps
optimizer.warmup_shape <- warmup_type warmup_style
optimizer.cooldown_steps <- wsd_decay_steps num_decay_steps lr_cooldown_steps
optimizer.cooldown_shape <- wsd_decay_type lr_wsd_decay_style cooldown_type
optimizer.cycles <- num_cycles num_restarts n_cycles
optimizer.weight_decay <- wd adam_weight_decay
optimizer.decay_embeddings <- weight_decay_embeddings decay_embedding
optimizer.decay_exclude <- weight_decay_exclusions no_decay weight_decay_exclude
optimizer.freeze <- frozen_params freeze_params frozen_layers freeze_layers
optimizer.moment_dtype <- bf16_momentum mu_dtype momentum_dtype bf16_accumulate_momentum
optimizer.ema <- ema_decay use_ema ema_rate
optimizer.loss_scale <- initial_loss_scale init_loss_scale
optimizer.momentum <- sgd_momentum muon_momentum muon_beta palm_optimizer.b1
optimizer.newton_schulz_steps <- ns_steps muon_ns_steps
optimizer.min_factored_size <- min_dim_size_to_factor
optimizer.scale_by_parameter <- multiply_by_parameter_scale scale_parameter
optimizer.b1 <- adam_beta1 beta1 adam_b1 beta_1 adamw_optimizer.b1
optimizer.b2 <- adam_beta2 beta2 adam_b2 beta_2 adamw_optimizer.b2
optimizer.eps <- adam_epsilon adam_eps epsilon
optimizer.clip_norm <- max_grad_norm clip_gradient grad_clip gradient_clipping max_norm grad_norm_clip
    gradient_clipping_threshold gradient_clip_val clip_grad_norm clip_grad
lora.rank <- lora_r lora_rank lora_dim lora.r
lora.alpha <- lora_alpha
lora.dropout <- lora_dropout
lora.rank_pattern <- rank_pattern
lora.alpha_pattern <- alpha_pattern
lora.targets <- target_modules lora_target_modules lora_modules lora.target
train.steps <- max_steps total_steps num_train_steps num_steps n_steps train_steps max_iters training_steps
    max_train_steps iterations
train.epochs <- num_train_epochs n_epochs num_epochs max_epochs epoch
train.log_every <- logging_steps log_freq log_interval log_period log_steps log_every_n_steps log.every logging.every
    log.interval
train.eval_every <- eval_steps eval_freq eval_interval evaluation_interval evaluation_steps steps_per_eval eval.every
    eval.interval eval.steps val_check_interval eval_every_steps
train.max_skipped <- max_skipped_steps max_consecutive_nans
eval.limit <- max_eval_samples max_eval_examples eval_samples eval.size eval_loss_batches
checkpoint.every <- save_steps save_every save_interval save_model_freq checkpoint_period checkpoint_every save_freq
    checkpoint.interval checkpoint_interval save_every_steps
checkpoint.keep <- save_total_limit keep_latest_k max_to_keep max_checkpoints keep_last_n
checkpoint.optimizer_state <- save_optimizer_state save_only_model last_save_model_only save_train_state
    save_opt_states
rules <- partition_rules
model.max_position_embeddings <- max_sequence_length
optimizer.decay_rate <- palm_optimizer.b2
eval.patience <- early_stopping_patience early_stop_patience patience num_patience
eval.at_start <- eval_at_beginning eval_sanity_check
log.all_workers <- log_all_worker
cluster.host0_address <- coordinator_address
cluster.n_processes <- num_processes
cluster.n_local_devices <- local_device_ids
checkpoint.every_epochs <- save_every_epochs save_ckpt_every_k_epochs
checkpoint.milestones <- save_milestone_freq milestone_freq
checkpoint.best <- save_best load_best_model_at_end metric_for_best_model save_argmin_ckpt_by_metrics
    save_argmax_ckpt_by_metrics
checkpoint.dtype <- float_dtype save_float_dtype save_bf16
checkpoint.push <- push_to_hub hub_model_id
train.eval_every_epochs <- eval_every_epochs
train.profile <- profile_steps
log.tensorboard <- run_tensorboard tensorboard
log.wandb <- report_to wandb use_wandb wandb_project wandb_log wandb_entity wandb_job_type wandb_init_kwargs
    project_id project_entity experiment_group experiment_note online logger.entity logger.notes logger.prefix
    logger.prefix_to_id logger.project
run the same command again to resume <- resume resume_from_checkpoint auto_resume resume_from resume_step
    continue_training autoresume should_restore_loop_state load_dataset_state start_seek_loc example_index_at_start
    index_at_start tokens_count_at_start
`prep train RECIPE --out RUN` <- output_dir out_dir save_dir workdir work_dir dump_folder base_output_directory output
    checkpoint_dir ckpt_dir outputs_path logger.gcs_output_dir
`prep train RECIPE --restart` starts again from step 0 <- overwrite_output_dir overwrite
DoRA is not supported; `use_rslora = true` in [lora] is rank-stabilised LoRA <- use_dora
metrics are written to RUN/metrics.jsonl <- logging_dir wandb_dir profile_dir throughput_average_window_size
the config of `model.path` sets it; for a random start `model.preset` or `model.config` <- model_type architecture
`prep train` trains, and evaluates if there is data for it: `data.eval_path` or `data.holdout` <- do_train do_eval
    eval_loss eval_at_end
`prep eval RUN --metric NAME` scores generated targets, `prep.train(metric_fn=...)` logits <- eval_predictor
    eval_metric_fn compute_metrics
`prep eval RUN --metric NAME --seq-length N`: N limits the generated targets <- max_generation_new_tokens
`prep generate RUN --max-new-tokens N` <- max_new_tokens
`data.fields`: brackets for the encoder, none for clm <- data_args.mode
`rules = "flaxlm:ACTIVATIONS,PARAMETERS"` above the first table; remove it for 1 and 1 <- activation_partitioning_dims
    parameter_partitioning_dims
`prep save-init CHECKPOINT --scan-axis 0|1` stacks the layers <- param_scan_axis
`prep train RECIPE -v` <- verbose
`log.samples` generates texts during a run, `prep eval RUN --metric NAME` the targets of its data <- generation_bsize
    generation_batches generation_do_sample generation_num_beams
`prep pad-vocab CHECKPOINT --multiple N --true-vocab N` pads the vocabulary <- n_real_tokens force_pad_embeddings
remove it: prep needs no such setting <- per_device_eval_batch_size eval_per_device_batch_size eval_loss_bsize
    eval_batch_size preprocessing_num_workers dataloader_num_workers num_workers tokenizer_processes num_proc
    tokenizer_parallel_chunk_size tokenizer_parallel_batch_size tokenize_batch_size group_batch_size save
    save_last_ckpt save_at_end save_at_beginning append_uuid reinit logger.resume use_cache causal remove_columns
    use_fast_tokenizer model_cls from_pt batch_token_dtype pad_right trunc_end decoder_trunc_end padding_side
    truncation_side streaming overwrite_cache float32_logits initialize_jax_distributed stop_after_profile
"""


def _parse_names(rows: str) -> dict[str, str]:
    """Return the recipe key or the advice by the names of other trainers. Indented lines continue a row."""
    meanings: dict[str, str] = {}
    for row in rows.strip().replace("\n    ", " ").split("\n"):
        meaning, _, names = row.partition(" <- ")
        meanings |= dict.fromkeys(names.split(), meaning)
    return meanings


OTHER_NAMES = _parse_names(OTHER_NAMES_TEXT)


def keys_in(table: str) -> dict[str, str]:
    """Return the keys of a table by their names. The table "" has the keys above the first table."""
    keys = [key.rpartition(".") for key in KEY_SCHEMAS]
    return {name: ".".join(filter(None, (each, name))) for each, _, name in keys if each == table}


def guess(path: str) -> str:
    """Return the recipe key or the advice for an unknown dotted name, or "" if there is none.

    >>> guess("training.learning-rate"), guess("optimizer.weight_deacy")
    ('optimizer.lr', 'optimizer.weight_decay')
    """
    # The longest suffix that another trainer has is known for certain, so it comes before similar spellings.
    parts = path.lower().replace("-", "_").split(".")
    for first in range(len(parts)):
        if meaning := OTHER_NAMES.get(".".join(parts[first:])):
            return meaning
    table, _, name = path.rpartition(".")
    if table in KEY_SCHEMAS:
        return table
    keys = keys_in(_similar_table(table))
    # difflib takes time in proportion to both lengths, and a key of a file may have megabytes.
    if similar := suggest(name[:MAX_VALUE_CHARS], keys):
        return keys[similar]
    return next((key for key in KEY_SCHEMAS if key.rpartition(".")[2] == name), "")


def _similar_table(table: str) -> str:
    return suggest(table[:MAX_VALUE_CHARS], TABLE_NAMES) or ""


def unknown_key_hint(path: str, is_override: bool = False) -> str:
    """Return a hint for the dotted path of an unknown key of a file, or of `--set`."""
    table, _, name = path.rpartition(".")
    kinds = [kind for kind, schemas in OPTIMIZER_SCHEMAS.items() if name in schemas]
    if table == "optimizer" and kinds:
        # Only optimizers of other types have it.
        return f"`{name}` is a key of {', '.join(kinds)}"
    key = guess(path)
    if not key:
        table = _similar_table(table)
        names = ", ".join(keys_in(table))
        if table:
            return f"known in [{table}]: {names}"
        return f"known: {names}, {', '.join(TABLE_NAMES)}"
    if key not in KEY_SCHEMAS:
        return key
    if is_override:
        return text("did you mean {}?", Key(key, "VALUE", is_override=True))
    table, _, name = key.rpartition(".")
    place = f"in [{table}]" if table else "above the first table"
    return f"did you mean `{name}` {place}?"


def option_hint(option: str) -> str:
    """Return a hint for an unknown option such as `--learning-rate`, or "" if no key matches."""
    key = guess(option.lstrip("-").replace("-", "_"))
    if key in KEY_SCHEMAS:
        return text("{}", Key(key, "VALUE", is_override=True))
    return key
