"""Forecasts of the weekly CO2 concentration at Mauna Loa, one year ahead. Real data, no download.

    python train.py --config=configs/co2_forecast.py --workdir=runs/co2
    python decode.py --workdir=runs/co2 --split=test

The data is in the package statsmodels (pip install statsmodels). Each forecast is based on the last two years. Training
takes less than two minutes on 2 busy cores. The test error (MAE) of three seeds is 0.59 to 0.62 ppm. The errors of the
naive forecast and of the seasonal-naive forecast are 2.68 and 1.79 ppm. CO2 rises every year. So a better simple
forecast repeats the last year, and adds the rise since the year before. We computed the error of this forecast
separately: 1.12 ppm.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    config = base.get_config()
    config.task = 'forecasting'
    config.model.update(kind='forecaster', num_layers=2, d_model=64, d_ff=128, num_heads=4, norm='pre',
                        activation='gelu', position='sinusoidal', dropout=0.1)
    config.model.update(patches={'patch': 13})  # a quarter of a year; 8 patches of context, and 4 to forecast
    config.data.update(source='builtin', name='co2', context=104, horizon=52, season=52)
    config.batch.rows = 64
    config.optimizer.update(schedule='cosine', peak=1e-3, warmup=100)
    config.train.steps = 1000  # 37 epochs of 1,673 windows
    config.eval.update(every=100, metric='mean_absolute_scaled_error')
    config.checkpoint.keep_last = 2
    return config
