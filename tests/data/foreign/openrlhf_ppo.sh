python3 -m openrlhf.cli.train_ppo_ray \
   --actor.num_nodes 1 --actor.num_gpus_per_node 2 --critic.num_nodes 1 --critic.num_gpus_per_node 2 \
   --vllm.num_engines 2 --vllm.tensor_parallel_size 2 \
   --actor.model_name_or_path OpenRLHF/Llama-3-8b-sft-mixture --reward.model_name_or_path OpenRLHF/Llama-3-8b-rm \
   --critic.model_name_or_path OpenRLHF/Llama-3-8b-rm --critic.learning_rate 9e-6 --actor.learning_rate 5e-7 \
   --train.batch_size 128 --train.micro_batch_size 8 --rollout.batch_size 1024 --rollout.micro_batch_size 16 \
   --rollout.max_new_tokens 1024 --data.max_len 2048 --data.prompt_dataset OpenRLHF/prompt-collection-v0.1 \
   --data.input_key context_messages --data.apply_chat_template --data.max_samples 100000 \
   --algo.kl.init_coef 0.01 --algo.kl.target 6 --algo.advantage.lambd 0.95 --ds.zero_stage 3 --ds.param_dtype bf16 \
   --reward.normalize_enable --actor.gradient_checkpointing_enable --ckpt.save_steps 50 --logger.wandb.key KEY
