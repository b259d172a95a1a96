import torch

from data.tokenizer import load_tokenizer
from model import GPT, AttentionConfig, ModelConfig
from train.documents import SeparateDocuments, document_ids, positions_in_documents
from train.sample import prompt_ids

END = 0


def test_a_document_begins_with_the_end_of_the_one_before():
    tokens = torch.tensor([[5, END, 6, 7, END, END, 8], [END, 1, 1, 1, 1, 1, END]])
    assert document_ids(tokens, END).tolist() == [[0, 1, 1, 1, 2, 3, 3], [1, 1, 1, 1, 1, 1, 2]]


def test_a_document_is_learned_as_samples_of_it_are_asked_for():
    config = ModelConfig(n_layer=2, n_head=2, n_embd=16, vocab_size=257, max_seq_len=64, dropout=0.0)
    gpt, tokenizer = GPT(config, AttentionConfig(implementation="sdpa")), load_tokenizer("bytes")
    prompts = [torch.tensor([prompt_ids(tokenizer, text, config)]) for text in ("a first", "and a second")]
    packed = torch.cat(prompts, dim=1)
    loss = SeparateDocuments(gpt, tokenizer.end_of_text)(packed, packed)
    alone = [ids.shape[1] * gpt(ids, ids) for ids in prompts]
    torch.testing.assert_close(loss, sum(alone) / packed.shape[1])


def test_positions_start_anew_with_each_document():
    ids = torch.tensor([[0, 0, 0, 4, 4], [1, 2, 2, 2, 3]], dtype=torch.int32)
    assert positions_in_documents(ids).tolist() == [[0, 1, 2, 0, 1], [0, 0, 1, 2, 0]]


def test_the_loss_of_packed_documents_is_that_of_each_alone():
    config = ModelConfig(n_layer=2, n_head=2, n_embd=16, vocab_size=50, max_seq_len=32, dropout=0.0)
    gpt = GPT(config, AttentionConfig(implementation="sdpa"))
    tokens, targets = torch.randint(1, 50, (2, 1, 30))
    tokens[0, 12] = END
    alone = [gpt(tokens[:, part], targets[:, part]) for part in (slice(0, 12), slice(12, 30))]
    packed = SeparateDocuments(gpt, END)(tokens, targets)
    torch.testing.assert_close(packed, (12 * alone[0] + 18 * alone[1]) / 30)
