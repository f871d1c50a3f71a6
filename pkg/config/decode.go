package config

import (
	"cmp"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// field is a key of the format.
type field struct {
	name, alias string
	index       int
	required    bool
}

type fields []field

// fieldsOf reads the tags of a struct.
func fieldsOf(t reflect.Type) fields {
	list := make(fields, 0, t.NumField())

	for i := range t.NumField() {
		tag := t.Field(i).Tag
		name, options, _ := strings.Cut(tag.Get("json"), ",")
		list = append(list, field{name: name, alias: tag.Get("alias"), index: i, required: options == ""})
	}

	return list
}

func (f fields) byName(name string) (field, bool) {
	i := slices.IndexFunc(f, func(f field) bool { return f.name == name || f.alias != "" && f.alias == name })
	if i < 0 {
		return field{}, false
	}

	return f[i], true
}

func (f fields) names() []string {
	names := make([]string, 0, len(f))
	for _, f := range f {
		names = append(names, f.name)
	}

	return names
}

// decoder fills Go values with what the file says, and reports what does not fit.
type decoder struct{ *report }

func (d decoder) decode(v *value, into reflect.Value, p path) {
	// A key without a value is as good as none.
	if v == nil || v.tag == tagNull {
		return
	}

	switch into.Kind() {
	case reflect.Struct:
		d.object(v, into, p)
	case reflect.Slice:
		d.list(v, into, p)
	case reflect.Map:
		d.texts(v, into, p)
	case reflect.Pointer:
		into.Set(reflect.New(into.Type().Elem()))
		d.decode(v, into.Elem(), p)
	case reflect.String:
		d.text(v, into, p)
	case reflect.Bool:
		d.truth(v, into, p)
	case reflect.Int:
		d.number(v, into, p)
	default:
		panic("config: no file can fill a " + into.Type().String())
	}
}

func (d decoder) object(v *value, into reflect.Value, p path) {
	if !d.fits(v, p, "a mapping", isTag(tagMap)) {
		return
	}

	known := fieldsOf(into.Type())
	set := map[int]string{}

	for _, e := range v.entries {
		f, found := known.byName(e.key)

		switch {
		case !found:
			d.unknown(e, known, p)
		case set[f.index] != "":
			d.add(e.line, e.column, p.with(e.key), "the same as "+set[f.index]+", which is set as well")
		default:
			set[f.index] = e.key
			d.decode(e.value, into.Field(f.index), p.with(e.key))
		}
	}

	for _, f := range known {
		if e, found := v.entry(f.name); f.required && (!found || e.value != nil && e.value.tag == tagNull) {
			d.at(p.with(f.name), "missing")
		}
	}
}

// unknown reports a key that is not part of the format, and what may have been meant.
func (d decoder) unknown(e entry, known fields, p path) {
	msg := "unknown key; there are " + strings.Join(known.names(), ", ")

	if owner, found := p.ownerOf(e.key); found {
		msg = "unknown key; it belongs to " + cmp.Or(owner.String(), "the top level") + ": look at the indentation"
	} else if near := nearest(e.key, known.names()); near != "" {
		msg = "unknown key; did you mean " + near + "?"
	}

	d.add(e.line, e.column, p.with(e.key), msg)
}

func (d decoder) list(v *value, into reflect.Value, p path) {
	if !d.fits(v, p, "a list", isTag(tagSeq)) {
		return
	}

	into.Set(reflect.MakeSlice(into.Type(), len(v.items), len(v.items)))

	for i, item := range v.items {
		if item != nil && item.tag == tagNull {
			d.at(p.with(i), "an entry with nothing in it")
		}

		d.decode(item, into.Index(i), p.with(i))
	}
}

// texts reads a mapping whose keys the user chooses. One without a value is an empty text there, as in the upstream Talos CCM.
func (d decoder) texts(v *value, into reflect.Value, p path) {
	if !d.fits(v, p, "a mapping", isTag(tagMap)) {
		return
	}

	into.Set(reflect.MakeMapWithSize(into.Type(), len(v.entries)))

	for _, e := range v.entries {
		element := reflect.New(into.Type().Elem()).Elem()
		d.decode(e.value, element, p.with(e.key))
		into.SetMapIndex(reflect.ValueOf(e.key), element)
	}
}

func (d decoder) text(v *value, into reflect.Value, p path) {
	if d.fits(v, p, "text", isText) {
		into.SetString(v.text)
	}
}

// truth knows true and false alone: yes and on are texts in YAML 1.2, and editors take them for such.
func (d decoder) truth(v *value, into reflect.Value, p path) {
	b, err := strconv.ParseBool(v.text)
	if err != nil || v.tag != tagBool {
		d.at(p, "must be true or false, not %s", describe(v))
	}

	into.SetBool(b)
}

// decimal excludes what YAML 1.1 reads as octal.
var decimal = regexp.MustCompile(`^-?(0|[1-9][0-9]{0,8})$`)

func (d decoder) number(v *value, into reflect.Value, p path) {
	if !d.fits(v, p, "a whole number", isTag(tagInt)) {
		return
	}

	if !decimal.MatchString(v.text) {
		d.at(p, "must be a whole number in plain digits, not %s", quote(v.text))

		return
	}

	if n, err := strconv.Atoi(v.text); err == nil {
		into.SetInt(int64(n))
	}
}

// fits reports a value of another type than is wanted.
func (d decoder) fits(v *value, p path, wanted string, fit func(tag string) bool) bool {
	if fit(v.tag) {
		return true
	}

	d.at(p, "must be %s, not %s", wanted, describe(v))

	return false
}

func isTag(want string) func(string) bool { return func(tag string) bool { return tag == want } }

// isText tells whether a scalar can be read as text: what looks like a number or a date was written as text all the same.
func isText(tag string) bool {
	return slices.Contains([]string{tagString, tagInt, tagFloat, tagBool, tagTime, tagMerge}, tag)
}

func describe(v *value) string {
	switch v.tag {
	case tagMap:
		return "a mapping"
	case tagSeq:
		return "a list"
	case tagString:
		return "the text " + quote(v.text)
	case tagNull:
		return "nothing"
	default:
		return quote(v.text)
	}
}
