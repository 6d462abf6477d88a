accelerate launch --config_file zero3.yaml train.py \
    --model_name_or_path Qwen/Qwen3-8B --dataset_name open-r1/DAPO-Math-17k-Processed --dataset_config en \
    --importance-sampling-level sequence --loss_type grpo --epsilon 3e-4 --epsilon_high 4e-4 --beta 0.0 \
    --num_generations 8 --per_device_train_batch_size 2 --gradient_accumulation_steps 8 --steps_per_generation 16 \
    --max_completion_length 4096 --max_steps 500 --learning_rate 1e-6 --warmup_ratio 0.05 --bf16 \
    --gradient_checkpointing False --reward_weights 0.7 0.3 --log_completions --report_to none
