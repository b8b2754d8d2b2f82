"""A short run of every kind of draft graph, for compute-sanitizer; see test_sanitizer.py."""

from releases import PROBABILISTIC
from support import engine, greedy, held_out_prompts

if __name__ == "__main__":
    # No torch.compile: its kernels are not ours, and the sanitizer is slow.
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
    with engine("eagle_mrv2", speculative=PROBABILISTIC, compilation_config=graphs, max_num_seqs=4) as llm:
        greedy(llm, held_out_prompts(3), 8)
        greedy(llm, held_out_prompts(1), 8, temperature=0.8, seed=1, top_k=20, top_p=0.9)
    with engine("eagle_mrv2", family="eagle3", compilation_config=graphs, max_num_seqs=4) as llm:
        greedy(llm, held_out_prompts(3), 8)
    print("short run done")
