"""Start an engine's server by one of the commands below, certify it and stop it:

    python tests/engines/serve.py vllm-ngram --model weights/target [certify's other flags]

{model} is --model's folder or file; {draft} is --draft's.
"""
