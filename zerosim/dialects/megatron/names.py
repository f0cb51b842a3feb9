"""Arguments of Megatron-LM d98e8a6 and of ms-swift's megatron that change neither bytes nor seconds of a step."""

from __future__ import annotations

_PREFIXES = """
--log- --save --load --eval- --data- --train-data --valid-data --test-data --tokenizer- --tiktoken- --wandb-
--tensorboard- --profile --inference- --rl- --grpo- --langrl- --retro- --one-logger- --app-tag- --inprocess-
--ckpt- --dist-ckpt- --non-persistent- --no-load- --no-save- --straggler --mask- --dino- --ict- --biencoder-
--retriever- --indexer- --vision- --timing- --exit- --check- --no-check- --use-checkpoint- --fp8- --fp4-
--tp-comm- --disable-tp-comm- --sharp- --error-injection --replication --muon- --mrope- --mamba- --yarn-
--wgrad- --result- --memory- --per-split- --adlr- --run-workload --use-pytorch-profiler --rerun- --logging-
"""
_IDLE = """
--use-mcore-models --use-legacy-models --distributed-backend --distributed-timeout-minutes
--distributed-timeout-seconds-after-init --seed --manual-gc --manual-gc-interval --no-manual-gc-eval
--empty-unused-memory-level --mock-data --split --vocab-file --merge-file --vocab-extra-ids --dataloader-type
--num-workers --reset-position-ids --reset-attention-mask --eod-mask-loss --finetune --pretrained-checkpoint
--calculate-per-token-loss --train-sync-interval --init-method-std --embedding-init-method-std
--init-method-xavier-uniform --data-parallel-random-init --use-cpu-initialization --no-initialization
--init-model-with-meta-device --apply-layernorm-1p --apply-residual-connection-post-layernorm --openai-gelu
--rotary-interleaved --rotary-seq-len-interpolation-factor --rotary-scaling-factor --use-rope-scaling
--rope-scaling-factor --rope-type --no-rope-freq --no-position-embedding --use-rotary-position-embeddings
--weight-decay-incr-style --lr-warmup-init --lr-wsd-decay-style --lr-wsd-decay-samples --lr-wsd-decay-iters
--override-opt_param-scheduler --override-opt-param-scheduler --use-checkpoint-opt_param-scheduler
--no-pin-cpu-grads --no-pin-cpu-params --use-torch-optimizer-for-cpu-offload --pipeline-model-parallel-comm-backend
--high-priority-stream-groups --nccl-communicator-config-path --local-rank --lazy-mpu-init
--disable-gloo-process-groups --deterministic-mode --iterations-to-skip --record-memory-history
--auto-detect-ckpt-format --use-dist-ckpt --async-save --use-persistent-ckpt-worker --trust-remote-code
--legacy-tokenizer --no-mmap-bin-files --no-create-attention-mask-in-dataloader --num-dataset-builder-threads
--object-storage-cache-path --mid-level-dataset-surplus --allow-ambiguous-pad-tokens --full-validation
--multiple-validation-sets --test-mode --skip-train --no-one-logger --enable-ft-package --calc-ft-timeouts
--config-logger-dir --no-barrier-with-level-1-timing --no-log-loss-scale-to-tensorboard --disable-msc
--enable-experimental --te-rng-tracker --inference-rng-tracker --no-clone-scatter-output-in-embedding
--no-align-grad-reduce --no-scatter-gather-tensors-in-pipeline --no-gradient-reduce-div-fusion
--ddp-reduce-scatter-with-fp32-accumulation --disable-symmetric-registration --use-sharp --sample-rate
--disable-bf16-reduced-precision-matmul --reuse-grad-buf-for-mxfp8-param-ag
--decrease-batch-size-if-needed
--moe-router-score-function --moe-router-pre-softmax --moe-router-topk-scaling-factor --moe-router-fusion
--moe-router-force-load-balancing --moe-router-padding-for-fp8 --moe-input-jitter-eps --moe-permute-fusion
--moe-per-layer-logging --moe-deepep-num-sms --moe-use-upcycling --moe-upcycling-granularity
--moe-router-padding-for-quantization --q-lora-rank --kv-lora-rank --qk-head-dim
--qk-pos-emb-head-dim --v-head-dim --mscale --mscale-all-dim --cuda-graph-warmup-steps --qk-l2-norm
--short-seq-prob --bert-no-binary-head --onnx-safe --use-te-activation-func --fp16-lm-cross-entropy
--enable-gloo-process-groups --use-fused-weighted-squared-relu --dump-param-to-param-group-map
--exit-signal-handler --persistent-save-interval --nccl-ub --no-strict-fsdp-dtensor-load
"""
_SWIFT = """
--dataset --split-dataset-ratio --packing --num-train-epochs --max-epochs --output-dir --dataset-num-proc
--save-safetensors --load-safetensors --mcore-model --mcore-adapters --model-type
--template --system --attn-impl --no-save-rng --use-hf --streaming --max-steps --report-to --hf-token
--padding-free --truncation-strategy --loss-scale --task-type --model-author --model-name --add-version
--val-dataset --columns --custom-register-path --merge-lora --lazy-tokenize --report-interval
"""
"""ms-swift's own, beside Megatron's."""


def is_idle(name: str) -> bool:
    """Return whether an argument is known to change no step."""
    stems = (f"{stem.removesuffix('-')}-" for stem in _PREFIXES.split())
    return name in _IDLE.split() or f"{name}-".startswith(tuple(stems))


def is_of_swift(name: str) -> bool:
    """Return whether ms-swift has an argument beside Megatron's."""
    return name in _SWIFT.split()


def names() -> list[str]:
    """Return the names, for the nearest one to an unknown name."""
    return [*_IDLE.split(), *_SWIFT.split()]
