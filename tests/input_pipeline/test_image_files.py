"""Folders of images, and the inputs of a prediction."""

import re
import struct
import zlib

import numpy as np
import pytest
from PIL import ExifTags, Image, TiffImagePlugin

from input_pipeline.array_files import read_inputs
from input_pipeline.input_format import InputFormat
from input_pipeline.preprocessing import Preprocessing
from runtime import once
from runtime.errors import UserError
from tests.input_pipeline.helpers import (
    CLASSES,
    INPUTS,
    SERIES,
    SPLITS,
    open_arrays,
    options,
    read,
    save_image,
    write_csv,
    write_npz,
)

COLOUR = np.random.default_rng(0).integers(0, 256, (5, 4, 3)).astype(np.uint8)
EXIF = Image.Exif()
EXIF[0x112], EXIF[0x10e] = 6, 'text'  # the orientation, and a description
DAMAGED_EXIF = EXIF.tobytes().replace(b'\x01\x0e', b'\x01\x20')  # the text becomes the value of a tag for numbers


def deep_png():
    """Returns a PNG file of a black image with 16 bits per channel. Pillow cannot write such files."""
    def chunk(kind, content):
        return struct.pack('>I', len(content)) + kind + content + struct.pack('>I', zlib.crc32(kind + content))

    return b'\x89PNG\r\n\x1a\n' + b''.join([
        chunk(b'IHDR', struct.pack('>IIBBBBB', 4, 5, 16, 2, 0, 0, 0)),
        chunk(b'IDAT', zlib.compress(bytes(5 * (1 + 4 * 6)))), chunk(b'IEND', b'')])


def deep_tiff():
    """Returns the header of a TIFF file with 16 bits per channel, in which the channels are stored separately."""
    tags = TiffImagePlugin.ImageFileDirectory_v2()
    for name, value in {'ImageWidth': 4, 'ImageLength': 5, 'BitsPerSample': (16, 16, 16), 'Compression': 1,
                        'PhotometricInterpretation': 2, 'StripOffsets': (8, 8, 8), 'SamplesPerPixel': 3,
                        'RowsPerStrip': 5, 'StripByteCounts': (40, 40, 40), 'PlanarConfiguration': 2}.items():
        tags[ExifTags.Base[name]] = value
    return b'II*\0' + struct.pack('<I', 8) + tags.tobytes(8)


def test_class_folders_without_folders_of_splits_are_divided(tmp_path):
    for number in range(24):
        save_image(tmp_path / 'ab'[number % 2] / 'more' / f'{number}.png', COLOUR[..., 0] + np.uint8(number))
    (tmp_path / 'a' / 'notes.txt').write_text('not an image')
    (tmp_path / '.hidden').mkdir()
    save_image(tmp_path / '.hidden' / 'x.png', COLOUR)
    save_image(tmp_path / 'a' / '._x.png', COLOUR)
    data = open_arrays(options(dir=str(tmp_path)), labelled=True)
    assert data.classes == ['a', 'b'] and [len(data.targets(split)) for split in SPLITS] == [12, 6, 6]
    assert data.inputs('train').shape == (12, 5, 4, 1) and data.inputs('train').dtype == np.uint8
    for name, target in zip(data.names('test'), data.targets('test'), strict=True):
        assert (tmp_path / name).exists() and name[0] == 'ab'[target]


@pytest.mark.parametrize('folders, message', [
    (['Training/cat', 'Training/dog', 'Testing/cat', 'Testing/dog'],
     "has no folder train, so its folders 'Testing', 'Training' would be the classes. But all of them contain the same "
     "folders of images, 'cat', 'dog'. Set the folder of the training data, such as --config.data.splits.train=Trai"),
    (['cat', 'dog', 'test/cat', 'test/dog'],
     "its folders 'cat', 'dog', 'test' would be the classes. But config.data.splits contains 'test'. Set the folder"),
    (['training/cat', 'validation/cat', 'test/cat'], "config.data.splits contains 'test', 'validation'. Set"),
    (['cat', 'dog', 'validation'], "config.data.splits contains 'validation'. Set"),
])
def test_folders_of_splits_are_no_classes(tmp_path, folders, message):
    for folder in folders:
        save_image(tmp_path / folder / '1.png', COLOUR)
    with pytest.raises(UserError, match=re.escape(message)):
        open_arrays(options(dir=str(tmp_path)), labelled=True)


def test_validation_images_without_folders_of_classes_are_not_replaced_by_training_images(tmp_path):
    for number in range(20):
        save_image(tmp_path / 'train' / 'ab'[number % 2] / f'{number}.png', COLOUR + np.uint8(number))
    save_image(tmp_path / 'test/1.png', COLOUR)
    data = open_arrays(options(dir=str(tmp_path)), labelled=True)
    assert [len(data.inputs(split)) for split in SPLITS] == [10, 5, 5]  # test images of competitions have no classes
    save_image(tmp_path / 'validation/1.png', COLOUR)
    data = open_arrays(options(dir=str(tmp_path)), labelled=True)
    assert data.parts.names == ()
    with pytest.raises(UserError, match=r'validation has no folders of images CLASS/FILE\.png'):
        data.inputs('validation')


def test_a_broken_link_to_a_class_is_an_error(tmp_path):
    save_image(tmp_path / 'train/a/1.png', COLOUR)
    (tmp_path / 'train/b').symlink_to(tmp_path / 'nowhere')
    with pytest.raises(UserError, match='train/b is a broken symbolic link'):
        read(tmp_path, validation_share=0.0)


def test_a_broken_link_beside_the_classes_is_no_error(tmp_path):
    for name in 'ab':
        save_image(tmp_path / name / '1.png', COLOUR)
    (tmp_path / 'README').symlink_to(tmp_path / 'nowhere')
    assert len(read(tmp_path, validation_share=0.0)[0]) == 2


def test_classes_may_have_folders(tmp_path):
    for folder in 'cat/day', 'cat/night', 'dog/day', 'dog/night', 'dog':
        save_image(tmp_path / folder / '1.png', COLOUR)
    assert open_arrays(options(dir=str(tmp_path), validation_share=0.0), labelled=True).classes == ['cat', 'dog']


def test_links_to_folders_are_followed(tmp_path):
    """Also if a link leads back to a folder that contains the link."""
    (tmp_path / 'data' / 'train').mkdir(parents=True)
    for name in 'ab':
        save_image(tmp_path / 'elsewhere' / name / 'more' / '1.png', COLOUR)
        (tmp_path / 'data' / 'train' / name).symlink_to(tmp_path / 'elsewhere' / name)
    (tmp_path / 'elsewhere' / 'a' / 'more' / 'again').symlink_to(tmp_path / 'elsewhere' / 'a')
    data = open_arrays(options(dir=str(tmp_path / 'data'), validation_share=0.0), labelled=True)
    np.testing.assert_array_equal(data.inputs('train'), [COLOUR, COLOUR])
    assert data.classes == ['a', 'b']
    assert read_inputs(str(tmp_path / 'data' / 'train'), data.form)[0] == ['a/more/1.png', 'b/more/1.png']


def test_images_of_all_kinds_become_bytes(tmp_path):
    grey, transparent = COLOUR[..., 0], np.concatenate([COLOUR, COLOUR[..., :1]], axis=-1)
    save_image(tmp_path / 'train/a/1.png', COLOUR)
    save_image(tmp_path / 'train/a/2.PNG', transparent)
    save_image(tmp_path / 'train/b/3.bmp', grey)
    palette = Image.fromarray(COLOUR).quantize(20)
    palette.save(tmp_path / 'train/b/4.gif')
    images, _ = read(tmp_path, validation_share=0.0)
    np.testing.assert_array_equal(images[:2], [COLOUR, COLOUR])
    np.testing.assert_array_equal(images[2], np.repeat(grey[..., None], 3, axis=-1))
    np.testing.assert_array_equal(images[3], palette.convert('RGB'))


def test_images_are_scaled_and_cropped_to_squares(tmp_path):
    save_image(tmp_path / 'train/a/1.png', np.full((8, 4, 3), 7, np.uint8))
    save_image(tmp_path / 'train/b/2.png', np.full((3, 9, 3), 9, np.uint8))
    with pytest.raises(UserError, match=r'2\.png has 9 x 3 pixels, but .*1\.png has 4 x 8\. Set config\.data\.image_s'):
        read(tmp_path, validation_share=0.0)
    data = open_arrays(options(dir=str(tmp_path), image_size=6, validation_share=0.0), labelled=True)
    assert data.inputs('train').shape == (2, 6, 6, 3) and data.form.resized
    assert data.inputs('train')[:, 3, 3, 0].tolist() == [7, 9]
    names, images = read_inputs(str(tmp_path / 'train'), data.form)
    assert names == ['a/1.png', 'b/2.png'] and images.shape == (2, 6, 6, 3)


def test_the_splits_do_not_depend_on_the_size_of_the_images(tmp_path):
    for number in range(60):
        save_image(tmp_path / 'ab'[number % 2] / f'{number}.png', np.full((9, 7, 3), number, np.uint8))

    def held_out(size):
        data = open_arrays(options(dir=str(tmp_path), image_size=size), labelled=True)
        return [set(data.inputs(split)[:, 0, 0, 0].tolist()) for split in ('validation', 'test')]

    assert held_out(0) == held_out(3) == held_out(12) and all(held_out(0))


def test_images_of_two_splits_that_are_equal_after_scaling_are_logged(tmp_path, caplog):
    once.warn_once.cache_clear()
    for number in range(60):
        image = np.random.default_rng(number).integers(0, 256, (8, 12, 3)).astype(np.uint8)
        save_image(tmp_path / 'a' / f'{number}.png', image)
        save_image(tmp_path / 'b' / f'{number}.png', image[:, 2:10])
    open_arrays(options(dir=str(tmp_path), image_size=8), labelled=True).inputs('validation')
    assert re.search(r'\(validation, .*\): \d+ of \d+ examples are also in the training data', caplog.text)


@pytest.mark.parametrize('suffix', ['.gif', '.png'])
def test_a_palette_of_grey_colours_is_greyscale_in_a_prediction_and_colour_in_training(tmp_path, suffix):
    grey, coloured = Image.fromarray(COLOUR[..., 0]).convert('RGB').quantize(20), Image.fromarray(COLOUR).quantize(20)
    save_image(tmp_path / 'train/a/x.png', COLOUR[..., 0])
    form = open_arrays(options(dir=str(tmp_path), validation_share=0.0), labelled=True).form
    grey.save(path := tmp_path / f'grey{suffix}')
    with Image.open(path) as image:
        assert image.mode == 'P'
    np.testing.assert_array_equal(read_inputs(str(path), form)[1], np.asarray(grey.convert('L'))[None, ..., None])
    coloured.save(path := tmp_path / f'coloured{suffix}')
    with pytest.raises(UserError, match=r'coloured\.\w+ is a colour image \(P\), but the training images are'):
        read_inputs(str(path), form)
    (tmp_path / 'others/train/a').mkdir(parents=True)
    grey.save(tmp_path / f'others/train/a/x{suffix}')
    assert read(tmp_path / 'others', validation_share=0.0)[0].shape == (1, 5, 4, 3)


@pytest.mark.parametrize('suffix', ['.gif', '.bmp'])
def test_a_palette_of_the_levels_of_grey_in_order_is_greyscale_in_training(tmp_path, suffix):
    levels = np.arange(256, dtype=np.uint8).reshape(16, 16)  # all levels: Pillow removes unused colours of a GIF
    (tmp_path / 'train/a').mkdir(parents=True)
    Image.fromarray(levels).convert('P').save(tmp_path / f'train/a/x{suffix}')
    np.testing.assert_array_equal(read(tmp_path, validation_share=0.0)[0], levels[None, ..., None])


def test_images_with_transparency_are_counted(tmp_path, caplog):
    once.log_once.cache_clear()
    caplog.set_level('INFO', logger='allyouneed')
    palette = Image.fromarray(COLOUR).quantize(20)
    save_image(tmp_path / 'train/a/1.png', COLOUR)
    save_image(tmp_path / 'train/a/2.png', np.dstack([COLOUR, COLOUR[..., :1]]))
    palette.save(tmp_path / 'train/a/3.gif', transparency=3)
    palette.save(tmp_path / 'train/a/4.png', transparency=3)
    palette.save(tmp_path / 'train/a/5.png')
    read(tmp_path, validation_share=0.0)
    assert re.search('3 of 5 images, such as in .*train/a, have an alpha channel or transparent colours', caplog.text)


@pytest.mark.parametrize('write, message', [
    (lambda path: path.write_bytes(b'no image'), r'test/a/x\.png cannot be read as an image'),
    (lambda path: path.write_bytes(path.read_bytes()[:60]), r'test/a/x\.png cannot be read as an image'),
    (lambda path: path.write_bytes(b''), r'test/a/x\.png cannot be read as an image: .*Repair or remove the file'),
    (lambda path: save_image(path, COLOUR, exif=DAMAGED_EXIF), r'test/a/x\.png cannot be read as an image: .*Repair'),
    (lambda path: (path.parent / 'y.png').symlink_to('none.png'), r'test/a/y\.png cannot be read as an image'),
    (lambda path: save_image(path, COLOUR[:4]), r'test/a/x\.png: images|test.*\(4, 4, 3\)'),
    (lambda path: Image.fromarray(np.arange(20, dtype=np.uint16).reshape(5, 4)).save(path), 'more than 8 bits per cha'),
    *((lambda path, content=content: path.write_bytes(content), r'x\.png has more than 8 bits per channel \(mode RGB\)')
      for content in (deep_png(), deep_tiff(), b'P6 4 5 65535\n' + bytes(120))),
    *((lambda path, suffix=suffix: save_image(path.with_suffix(suffix), COLOUR, save_all=True, append_images=[
        Image.fromarray(255 - COLOUR)]), rf'x{suffix} contains 2 images \(pages or frames\).* as separate files')
      for suffix in ('.gif', '.png', '.tiff', '.webp')),
])
def test_images_that_cannot_be_used_are_named(tmp_path, write, message):
    for split in 'train', 'test':
        save_image(tmp_path / split / 'a/x.png', COLOUR)
    write(tmp_path / 'test/a/x.png')
    with pytest.raises(UserError, match=message):
        read(tmp_path, 'test', validation_share=0.0)


def test_a_photo_with_a_preview_in_the_same_file_is_one_image(tmp_path):
    save_image(tmp_path / 'train/a/x.jpg', COLOUR, format='MPO', save_all=True, append_images=[Image.fromarray(COLOUR)])
    assert read(tmp_path, validation_share=0.0)[0].shape == (1, 5, 4, 3)


def test_smaller_versions_of_an_image_in_the_same_tiff_file_are_not_read(tmp_path):
    smaller = Image.fromarray(255 - COLOUR[:2, :2])
    smaller.encoderinfo = {'tiffinfo': {ExifTags.Base.NewSubfileType: 1}}
    save_image(tmp_path / 'train/a/x.tiff', COLOUR, save_all=True, append_images=[smaller])
    with Image.open(tmp_path / 'train/a/x.tiff') as image:
        assert getattr(image, 'n_frames', 1) == 2
    np.testing.assert_array_equal(read(tmp_path, validation_share=0.0)[0], [COLOUR])


def test_photos_are_turned_upright(tmp_path):
    save_image(tmp_path / 'train/a/x.png', COLOUR, exif=EXIF)
    np.testing.assert_array_equal(read(tmp_path, validation_share=0.0)[0], [np.rot90(COLOUR, -1)])


def test_a_colour_image_among_greyscale_images_is_refused(tmp_path):
    save_image(tmp_path / 'train/a/x.png', COLOUR[..., 0])
    save_image(tmp_path / 'test/a/x.png', COLOUR)
    with pytest.raises(UserError, match=r'test/a/x\.png is a colour image \(RGB\), but the training images are grey'):
        read(tmp_path, 'test', validation_share=0.0)


def test_images_that_are_saved_again_may_have_another_number_of_channels(tmp_path):
    for image in COLOUR[..., 0], COLOUR, COLOUR[..., 0]:
        save_image(tmp_path / 'train/a/x.png', image)
        assert read(tmp_path, validation_share=0.0)[0].shape == (1, 5, 4, 3 if image.ndim == 3 else 1)


def test_image_size_is_only_for_folders_of_images(tmp_path):
    write_npz(tmp_path, inputs=INPUTS, targets=CLASSES)
    with pytest.raises(UserError, match=r'image_size=8 is only for folders of images, but .* has train\.npz'):
        read(tmp_path, image_size=8)


def test_missing_values_are_only_for_series(tmp_path):
    save_image(tmp_path / 'train/a/1.png', COLOUR)
    with pytest.raises(UserError, match=r'missing=mean is only for series, but .*train has images\. Set missing=error'):
        read(tmp_path, missing='mean', validation_share=0.0)


# Inputs of a prediction

def test_inputs_are_read_from_a_folder_an_image_a_table_and_an_archive(tmp_path):
    for name in 'x.png', 'y/z.png':
        save_image(tmp_path / 'images' / name, COLOUR)
    pictures = InputFormat((5, 4, 3), Preprocessing([127.5] * 3, [127.5] * 3, None, None), ('0',), encoding='bytes',
                           dtype='uint8')
    names, images = read_inputs(str(tmp_path / 'images'), pictures)
    assert names == ['x.png', 'y/z.png']
    np.testing.assert_array_equal(images, [COLOUR, COLOUR])
    path = str(tmp_path / 'images/x.png')
    assert read_inputs(path, pictures)[0] == [path]
    write_csv(tmp_path, 'series,y,time,x', 'a,1,1,2', 'b,3,1,4', 'a,5,0,6', 'b,7,0,8', split='new')
    table = InputFormat((2, 2), Preprocessing([0.0] * 2, [1.0] * 2, None, None), ('0',), channels=('x', 'y'))
    names, series = read_inputs(str(tmp_path / 'new.csv'), table)
    assert names == ['a', 'b']
    np.testing.assert_array_equal(series, [[[6, 5], [2, 1]], [[8, 7], [4, 3]]])
    for path, form, message in ((tmp_path / 'images', table, 'images, but the model reads series'),
                                (tmp_path / 'new.csv', pictures, 'was not trained on tables.* or images'),
                                (tmp_path / 'new.csv', SERIES, 'was not trained on tables'),
                                (tmp_path / 'none.png', pictures, r'none\.png cannot be read as an image'),
                                (tmp_path / 'none', pictures, 'is not a file. Use a folder of images')):
        with pytest.raises(UserError, match=message):
            read_inputs(str(path), form)
    for channels in 2, 4:
        form = InputFormat((5, 4, channels), Preprocessing([0.0] * channels, [1.0] * channels, None, None), ('0',))
        with pytest.raises(UserError, match=rf'x\.png is an image file .* {channels} channels\. Use an \.npz file'):
            read_inputs(str(tmp_path / 'images'), form)
    save_image(tmp_path / 'images/y/small.png', COLOUR[:4])
    with pytest.raises(UserError, match=r'small\.png has 4 x 4 pixels, but the model reads images of 4 x 5 pixels\. S'):
        read_inputs(str(tmp_path / 'images'), pictures)
    (tmp_path / 'empty').mkdir()
    with pytest.raises(UserError, match='empty has no images'):
        read_inputs(str(tmp_path / 'empty'), pictures)
