"""Specs of `transformers` models that the rules are tried on, with what each needs to be capturable."""

from __future__ import annotations

# Experts that run one batched product instead of a loop over those that got tokens, whose number is data.
MOE = "experts_implementation=batched_mm"

# Spans of time are masked by numpy, and layers skipped, at random: both would be frozen or refused.
SPEECH = "apply_spec_augment=false,layerdrop=0"

LANGUAGE = [
    "hf:LlamaForCausalLM",
    "hf:MistralForCausalLM",
    "hf:MinistralForCausalLM:head_dim=8",
    "hf:Qwen2ForCausalLM",
    "hf:Qwen3ForCausalLM",
    "hf:GemmaForCausalLM",
    "hf:Gemma2ForCausalLM",
    "hf:Gemma3ForCausalLM",
    "hf:PhiForCausalLM",
    "hf:Phi3ForCausalLM",
    "hf:GPT2LMHeadModel",
    # Its pattern of 24 attention layers is written out in the configuration.
    "hf:GPTNeoForCausalLM:num_layers=24,hidden_size=16",
    "hf:GPTNeoXForCausalLM",
    "hf:GPTJForCausalLM",
    "hf:GPTBigCodeForCausalLM",
    "hf:OPTForCausalLM",
    "hf:BloomForCausalLM",
    "hf:FalconForCausalLM",
    "hf:MptForCausalLM",
    "hf:StableLmForCausalLM",
    "hf:CohereForCausalLM",
    "hf:Cohere2ForCausalLM",
    "hf:OlmoForCausalLM",
    "hf:Olmo2ForCausalLM",
    "hf:Olmo3ForCausalLM",
    "hf:GraniteForCausalLM",
    "hf:Starcoder2ForCausalLM",
    "hf:CodeGenForCausalLM",
    "hf:NemotronForCausalLM:num_key_value_heads=2",
    "hf:GlmForCausalLM",
    "hf:Glm4ForCausalLM",
    "hf:HeliumForCausalLM",
    "hf:SmolLM3ForCausalLM",
    "hf:Exaone4ForCausalLM",
    "hf:XGLMForCausalLM",
    "hf:BioGptForCausalLM",
    "hf:LlamaForSequenceClassification",
]
ENCODERS = [
    "hf:BertForMaskedLM",
    "hf:BertModel",
    "hf:BertForPreTraining",
    "hf:BertForQuestionAnswering",
    "hf:RobertaForMaskedLM",
    "hf:DistilBertForSequenceClassification",
    "hf:AlbertForMaskedLM",
    "hf:ElectraForTokenClassification",
    "hf:DebertaForMaskedLM",
    "hf:DebertaV2ForMaskedLM",
    "hf:MPNetForMaskedLM",
    "hf:ModernBertForMaskedLM",
    "hf:XLMRobertaForSequenceClassification",
    "hf:CamembertForMaskedLM",
    "hf:ConvBertForMaskedLM",
    "hf:MobileBertForMaskedLM:embedding_size=16",
    "hf:SqueezeBertForMaskedLM",
    "hf:FunnelForMaskedLM",
    "hf:FNetForMaskedLM",
    # Its sparse attention gives way to the full one on short texts, in the middle of the first forward pass.
    "hf:BigBirdForMaskedLM:attention_type=original_full",
    "hf:NystromformerForMaskedLM",
    "hf:RoFormerForMaskedLM",
    "hf:EsmForMaskedLM:vocab_size=33,pad_token_id=1,mask_token_id=4",
    "hf:XLNetLMHeadModel",
    "hf:LayoutLMForMaskedLM",
]
ENCODER_DECODERS = [
    "hf:T5ForConditionalGeneration",
    "hf:MT5ForConditionalGeneration",
    "hf:UMT5ForConditionalGeneration",
    "hf:BartForConditionalGeneration",
    "hf:MBartForConditionalGeneration",
    "hf:PegasusForConditionalGeneration",
    "hf:MarianMTModel",
    "hf:BlenderbotForConditionalGeneration",
    "hf:BlenderbotSmallForConditionalGeneration",
    "hf:M2M100ForConditionalGeneration:encoder_layerdrop=0,decoder_layerdrop=0",
    "hf:PLBartForConditionalGeneration",
    "hf:ProphetNetForConditionalGeneration",
]
VISION = [
    "hf:ViTForImageClassification",
    "hf:ViTForMaskedImageModeling",
    "hf:ViTMAEForPreTraining",
    "hf:DeiTForImageClassification",
    "hf:BeitForImageClassification",
    "hf:Data2VecVisionForImageClassification",
    # Two stages of 8×8 and 4×4 patches, each a whole number of windows.
    "hf:SwinForImageClassification:depths=1-1,num_heads=2-4,window_size=4",
    "hf:Swinv2ForImageClassification",
    "hf:ConvNextForImageClassification",
    "hf:ConvNextV2ForImageClassification",
    "hf:ResNetForImageClassification",
    "hf:RegNetForImageClassification",
    "hf:Dinov2ForImageClassification",
    "hf:SegformerForImageClassification",
    "hf:SegformerForSemanticSegmentation",
    "hf:MobileViTForImageClassification",
    "hf:MobileNetV1ForImageClassification",
    "hf:MobileNetV2ForImageClassification",
    "hf:EfficientNetForImageClassification:width_coefficient=0.1,hidden_dim=128,depth_coefficient=0.5",
    "hf:BitForImageClassification:num_groups=8",
    "hf:CvtForImageClassification",
    "hf:PvtForImageClassification",
    "hf:PoolFormerForImageClassification",
    "hf:LevitForImageClassification",
    "hf:FocalNetForImageClassification",
    "hf:HieraForImageClassification",
]
AUDIO = [
    f"hf:Wav2Vec2ForSequenceClassification:{SPEECH}",
    f"hf:HubertForSequenceClassification:{SPEECH}",
    f"hf:WavLMForSequenceClassification:{SPEECH}",
    f"hf:SEWForSequenceClassification:{SPEECH}",
    f"hf:UniSpeechForSequenceClassification:{SPEECH}",
    "hf:WhisperForConditionalGeneration",
    "hf:Speech2TextForConditionalGeneration",
    "hf:ASTForAudioClassification",
]
MULTIMODAL = [
    "hf:CLIPModel",
    "hf:SiglipModel",
    "hf:ChineseCLIPModel",
    "hf:AltCLIPModel",
    "hf:BlipForConditionalGeneration",
    "hf:GitForCausalLM",
    "hf:LlavaForConditionalGeneration",
    "hf:PaliGemmaForConditionalGeneration:projection_dim=32,vision_config.projection_dim=32",
]
STATE_SPACE = [
    "hf:MambaForCausalLM",
    "hf:Mamba2ForCausalLM:num_heads=8,head_dim=8,n_groups=2,chunk_size=4",
    "hf:FalconMambaForCausalLM",
    "hf:RwkvForCausalLM",
    "hf:JambaForCausalLM",
    "hf:RecurrentGemmaForCausalLM",
]
MIXTURES = [
    f"hf:MixtralForCausalLM:{MOE}",
    f"hf:Qwen2MoeForCausalLM:{MOE}",
    f"hf:Qwen3MoeForCausalLM:{MOE}",
    f"hf:OlmoeForCausalLM:{MOE}",
    f"hf:GptOssForCausalLM:{MOE}",
    f"hf:DeepseekV2ForCausalLM:num_experts_per_tok=2,{MOE}",
    f"hf:DeepseekV3ForCausalLM:num_key_value_heads=4,{MOE}",
    f"hf:GraniteMoeForCausalLM:{MOE}",
    f"hf:Ernie4_5_MoeForCausalLM:{MOE}",
    f"hf:Llama4ForCausalLM:{MOE}",
]

ARCHITECTURES: tuple[str, ...] = (
    *LANGUAGE,
    *ENCODERS,
    *ENCODER_DECODERS,
    *VISION,
    *AUDIO,
    *MULTIMODAL,
    *STATE_SPACE,
    *MIXTURES,
)

REFUSED: dict[str, str] = {
    f"hf:PhimoeForCausalLM:{MOE}": "trains its router with an autograd function whose backward is its own",
    "hf:LongformerForMaskedLM": "asks whether any token attends globally, and branches on the answer",
    "hf:LEDForConditionalGeneration": "asks whether any token attends globally, and branches on the answer",
    # As many image tokens as patches, so that there is nothing to pool.
    "hf:Gemma3ForConditionalGeneration:mm_tokens_per_image=4": "makes its image mask with torch.vmap",
    "hf:IBertForMaskedLM": "asserts that the observed range holds no nan",
    "hf:FSMTForConditionalGeneration": "asks whether any token is padding, and branches on the answer",
    "hf:LongT5ForConditionalGeneration": "makes no mask while it is captured, then asks for the mask's shape",
    "hf:SwitchTransformersForConditionalGeneration": "makes no mask while it is captured, then slices it",
    "hf:Wav2Vec2ForCTC": "compares the largest label with the vocabulary",
    "hf:HubertForCTC": "compares the largest label with the vocabulary",
    "hf:ViltForMaskedLM": "resizes positions to the number of unmasked pixels",
    "hf:ViltForQuestionAnswering": "resizes positions to the number of unmasked pixels",
}
"""Models that build and train but cannot be captured: what they do next depends on the data."""

EAGER_ONLY = frozenset(
    {
        "BigBirdForMaskedLM",
        "BitForImageClassification",
        "BlipForConditionalGeneration",
        "BloomForCausalLM",
        "CodeGenForCausalLM",
        "ConvBertForMaskedLM",
        "ConvNextForImageClassification",
        "ConvNextV2ForImageClassification",
        "CvtForImageClassification",
        "DebertaForMaskedLM",
        "DebertaV2ForMaskedLM",
        "EfficientNetForImageClassification",
        "FNetForMaskedLM",
        "FalconMambaForCausalLM",
        "FocalNetForImageClassification",
        "FunnelForMaskedLM",
        "GPTJForCausalLM",
        "GPTNeoForCausalLM",
        "Gemma2ForCausalLM",
        "GitForCausalLM",
        "GptOssForCausalLM",
        "HieraForImageClassification",
        "LevitForImageClassification",
        "MPNetForMaskedLM",
        "Mamba2ForCausalLM",
        "MambaForCausalLM",
        "MobileNetV1ForImageClassification",
        "MobileNetV2ForImageClassification",
        "MobileViTForImageClassification",
        "MptForCausalLM",
        "NystromformerForMaskedLM",
        "PoolFormerForImageClassification",
        "ProphetNetForConditionalGeneration",
        "PvtForImageClassification",
        "RegNetForImageClassification",
        "ResNetForImageClassification",
        "RoFormerForMaskedLM",
        "RwkvForCausalLM",
        "Speech2TextForConditionalGeneration",
        "SqueezeBertForMaskedLM",
        "Swinv2ForImageClassification",
        "WavLMForSequenceClassification",
        "XGLMForCausalLM",
        "XLNetLMHeadModel",
    }
)
"""Classes for which `transformers` has no scaled_dot_product_attention, or no attention at all."""


def with_eager_attention(spec: str) -> str:
    """The same model with attention written out; by default a model takes the fused op where it has one."""
    return spec + (":" if spec.count(":") == 1 else ",") + "attn_implementation=eager"
