import torch

from model import GPT, AttentionConfig, ModelConfig
from train.documents import SeparateDocuments, document_ids, positions_in_documents

END = 0


def test_a_document_ends_with_its_end_of_text():
    tokens = torch.tensor([[5, END, 6, 7, END, END, 8], [END, 1, 1, 1, 1, 1, END]])
    assert document_ids(tokens, END).tolist() == [[0, 0, 1, 1, 1, 2, 3], [0, 1, 1, 1, 1, 1, 1]]


def test_positions_start_anew_with_each_document():
    ids = torch.tensor([[0, 0, 0, 4, 4], [1, 2, 2, 2, 3]], dtype=torch.int32)
    assert positions_in_documents(ids).tolist() == [[0, 1, 2, 0, 1], [0, 0, 1, 2, 0]]


def test_the_loss_of_packed_documents_is_that_of_each_alone():
    config = ModelConfig(n_layer=2, n_head=2, n_embd=16, vocab_size=50, max_seq_len=32, dropout=0.0)
    gpt = GPT(config, AttentionConfig(implementation="sdpa"))
    tokens, targets = torch.randint(1, 50, (2, 1, 30))
    tokens[0, 11] = END
    alone = [gpt(tokens[:, part], targets[:, part]) for part in (slice(0, 12), slice(12, 30))]
    packed = SeparateDocuments(gpt, END)(tokens, targets)
    torch.testing.assert_close(packed, (12 * alone[0] + 18 * alone[1]) / 30)
