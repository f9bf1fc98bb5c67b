"""Names that earlier versions gave to settings of models:

old checkpoints and runs still contain them.
"""

#: Old key of the model's settings -> its key today.
RENAMED = {
    "no_norm_agreement": "no_average_norm_stats",
    "norm_window": "norm_options.window",
    "outlier_filtration": "norm_options.outlier_filtration",
    "renorm_updates": "norm_options.renorm_updates",
    "renorm_r_max": "norm_options.renorm_r_max",
    "renorm_d_max": "norm_options.renorm_d_max",
    "reg_lambda_mean": "norm_options.lambda_mean",
    "reg_lambda_var": "norm_options.lambda_var",
    "fade_updates": "norm_options.fade_updates",
    "norm_groups": "norm_options.groups",
    "norm_detach": "norm_options.detach",
    "ada_k": "norm_options.ada_k",
    "ada_scale": "norm_options.ada_scale",
    "alpha_init": "norm_options.alpha_init",
}
