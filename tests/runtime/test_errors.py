from runtime.errors import first_line, first_names


def test_the_first_line_of_an_error_without_a_message_is_its_type():
    assert [first_line(error) for error in (ValueError(), ValueError('\n a\nb'), ValueError('c' * 400))] == [
        'ValueError', 'a', 'c' * 300]


def test_the_names_after_the_first_names_are_counted():
    assert [first_names('abc'[:count], 2) for count in range(4)] == ['', 'a', 'a, b', 'a, b and 1 more']
