from train.loop import seed_of


def test_every_rank_has_a_seed_of_its_own_in_every_step_of_every_run():
    places = [(seed, step, rank) for seed in (0, 1, 2**31) for step in range(100) for rank in range(64)]
    seeds = [seed_of(*place) for place in places]
    assert len(set(seeds)) == len(places)
    # torch.manual_seed takes it, and a resumed run finds it again
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert seeds[:100] == [seed_of(*place) for place in places[:100]]
