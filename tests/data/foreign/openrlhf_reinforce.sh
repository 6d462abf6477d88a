RM=http://localhost:5000/get_reward
python3 -m openrlhf.cli.train_ppo_ray \
   --actor_num_gpus_per_node 8 --vllm_num_engines 4 --async_train --vllm_tensor_parallel_size 2 \
   --advantage_estimator reinforce --init_kl_coef 0 --eps_clip 0.3 --gamma 0.99 \
   --pretrain meta-llama/Llama-3.1-8B --remote_rm_url $RM \
   --train_batch_size 256 --rollout_batch_size 256 --n_samples_per_prompt 1 --prompt_max_len 512 \
   --generate_max_len 2048 --use_dynamic_batch --train_max_tokens_per_gpu 16384 --max_norm 0.5 --seed 7 \
   --prompt_data prompts.jsonl --input_key question --label_key answer --lr_scheduler cosine_with_min_lr \
   --save_path ./ckpt/rpp --full_determinism
