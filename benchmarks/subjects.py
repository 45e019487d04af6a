"""What is trained in the proof: models of the zoo, in sizes that fit the labs.

In: nothing. Out: `Subject`s for hosts that are processors (`ON_CPU`), for labs that are not (`SUBJECTS`), and the rest
of the zoo for both (`REST`, `RESTS`), of which only predictions are looked at.
"""

from __future__ import annotations

from contestants import Subject

# A step takes half a second to a second on a whole core; HAP's four first. Dropout would draw other numbers elsewhere.
ON_CPU = (
    Subject("vgg19", "vgg19:width=32,ffn=1024,dropout=0,batch=64", sums=True),
    Subject("vit", "vit:layers=4,width=256,heads=4,dropout=0,batch=48", sums=True),
    Subject("bert", "bert:layers=4,width=256,heads=4,seq=64,vocab=4096,dropout=0,batch=32", sums=True),
    Subject(
        "bert-moe",
        "bert-moe:layers=4,width=192,heads=4,seq=64,vocab=2048,experts=8,dropout=0,batch=48",
        sums=True,
    ),
    Subject("gpt2", "gpt2:layers=4,width=256,heads=4,seq=128,vocab=4096,dropout=0,batch=16"),
    Subject("llama", "llama:layers=4,width=256,heads=4,kv_heads=2,ffn=704,seq=128,vocab=4096,batch=16"),
)
# The rest of the zoo, to see how well steps are predicted; batch norm and means over pixels are not what others train.
REST = (
    Subject("mlp", "mlp:layers=6,width=1024,batch=1024"),
    Subject("resnet50", "resnet50:width=16,image=64,batch=64,classes=100"),
    Subject("unet", "unet:width=32,batch=8,dropout=0"),
    Subject("t5", "t5:layers=2,width=256,heads=4,seq=64,vocab=4096,batch=16,dropout=0"),
)
# Many tokens for few parameters: gloo between processes on one GPU is slow beside what the GPU computes.
ON_GPU = (
    Subject("vgg19", "vgg19:ffn=1024,dropout=0,batch=2048", sums=True, autocast="bf16"),
    Subject("vit", "vit:layers=8,width=512,heads=8,dropout=0,batch=4096", sums=True, autocast="bf16"),
    Subject(
        "bert",
        "bert:layers=8,width=512,heads=8,seq=128,vocab=8192,dropout=0,batch=2048",
        sums=True,
        autocast="bf16",
    ),
    Subject(
        "bert-moe",
        "bert-moe:layers=4,width=512,heads=8,seq=128,vocab=8192,experts=8,dropout=0,batch=1024",
        sums=True,
        autocast="bf16",
    ),
    Subject("gpt2", "gpt2:layers=8,width=512,heads=8,seq=512,vocab=8192,dropout=0,batch=384", autocast="bf16"),
    Subject(
        "llama",
        "llama:layers=8,width=512,heads=8,kv_heads=4,ffn=1408,seq=512,vocab=8192,batch=384",
        autocast="bf16",
    ),
)
# In float32: in a process with this part of the multiprocessors, products of bf16 come out wrong (docs/lab.md).
ON_GPU_2 = (
    Subject("vgg19", "vgg19:ffn=1024,dropout=0,batch=1024", sums=True),
    Subject("vit", "vit:layers=8,width=512,heads=8,dropout=0,batch=512", sums=True),
    Subject("bert", "bert:layers=8,width=512,heads=8,seq=128,vocab=8192,dropout=0,batch=256", sums=True),
    Subject(
        "bert-moe", "bert-moe:layers=4,width=512,heads=8,seq=128,vocab=8192,experts=8,dropout=0,batch=128", sums=True
    ),
    Subject("gpt2", "gpt2:layers=8,width=512,heads=8,seq=512,vocab=8192,dropout=0,batch=48"),
    Subject("llama", "llama:layers=8,width=512,heads=8,kv_heads=4,ffn=1408,seq=512,vocab=8192,batch=48"),
)
# Where GPUs talk over NCCL: these too, in the sizes that everyone trains them in.
ON_NCCL = (
    *ON_GPU,
    Subject("gpt2-124m", "gpt2:dropout=0,seq=1024,batch=32,vocab=50304", autocast="bf16"),
    Subject("vit-b16", "vit:image=224,patch=16,batch=192,dropout=0", sums=True, autocast="bf16"),
    Subject(
        "bert-large",
        "bert:layers=24,width=1024,heads=16,seq=512,batch=24,dropout=0",
        sums=True,
        autocast="bf16",
    ),
)
QUICK = (
    Subject("gpt2", "gpt2:layers=2,width=64,heads=2,seq=32,vocab=256,dropout=0,batch=16"),
    Subject("bert", "bert:layers=2,width=64,heads=2,seq=32,vocab=256,dropout=0,batch=16", sums=True),
)
REST_ON_GPU = (
    Subject("mlp", "mlp:layers=6,width=2048,batch=131072", autocast="bf16"),
    Subject("resnet50", "resnet50:width=64,image=64,batch=2048,classes=100", autocast="bf16"),
    Subject("unet", "unet:width=64,batch=256,dropout=0", autocast="bf16"),
    Subject("t5", "t5:layers=4,width=512,heads=8,seq=128,vocab=8192,batch=768,dropout=0", autocast="bf16"),
)
REST_ON_GPU_2 = (
    Subject("mlp", "mlp:layers=6,width=2048,batch=16384"),
    Subject("resnet50", "resnet50:width=64,image=64,batch=512,classes=100"),
    Subject("unet", "unet:width=64,batch=96,dropout=0"),
    Subject("t5", "t5:layers=4,width=512,heads=8,seq=128,vocab=8192,batch=96,dropout=0"),
)
SUBJECTS = {"lab-gpu": ON_GPU, "lab-gpu-2": ON_GPU_2, "lab-nccl": ON_NCCL, "lab-nccl-2": ON_NCCL}
RESTS = {"lab-gpu": REST_ON_GPU, "lab-gpu-2": REST_ON_GPU_2, "lab-nccl": REST_ON_GPU, "lab-nccl-2": REST_ON_GPU}
"""Of labs that are not made of processors."""
