package main

import (
	"bytes"
	"encoding/json"
	"reflect"
	"slices"

	"github.com/invopop/jsonschema"

	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/pkg/rules"
)

// enums are the values of enumerated types.
var enums = map[reflect.Type][]any{
	reflect.TypeFor[rules.Operator](): {
		rules.In, rules.NotIn, rules.Exists, rules.DoesNotExist, rules.Gt, rules.Lt, rules.Regexp,
	},
	reflect.TypeFor[config.ProviderIDFallback](): {config.FallbackUUID, config.FallbackNodeIP},
	reflect.TypeFor[config.BlockSize]():          {config.BlockSizeAuto},
}

// generateSchema returns the JSON schema, which accepts every file that Parse accepts.
func generateSchema(r *jsonschema.Reflector) ([]byte, error) {
	root := r.Reflect(config.Config{})
	root.Title = "talos-ccm configuration"
	amend(root, reflect.TypeFor[config.Config]())
	allowNull(root)

	var out bytes.Buffer

	encoder := json.NewEncoder(&out)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", "  ")

	err := encoder.Encode(root)

	return out.Bytes(), err
}

// mapScalar returns the schema of a string or an enumerated type; nil for other types. Numbers and booleans are read
// as strings.
func mapScalar(t reflect.Type) *jsonschema.Schema {
	if values, found := enums[t]; found {
		return &jsonschema.Schema{Enum: values}
	}

	if t.Kind() == reflect.String {
		return &jsonschema.Schema{Extras: map[string]any{"type": []string{"string", "number", "boolean"}}}
	}

	return nil
}

// amend adds what reflection does not find: keys without a value, and other spellings.
func amend(s *jsonschema.Schema, t reflect.Type) {
	switch t.Kind() {
	case reflect.Pointer:
		amend(s, t.Elem())
	case reflect.Slice:
		amend(s.Items, t.Elem())
	case reflect.Map:
		allowNull(s.AdditionalProperties)
	case reflect.Struct:
		for f := range t.Fields() {
			property := s.Properties.Value(keyOf(f))
			amend(property, f.Type)

			if !isRequired(f) {
				allowNull(property)
			}

			if alias := f.Tag.Get("alias"); alias != "" {
				other := *property
				other.Description = "Another spelling of " + keyOf(f) + "."
				s.Properties.Set(alias, &other)
				s.Not = &jsonschema.Schema{Type: "object", Required: []string{keyOf(f), alias}}
			}
		}
	default:
	}
}

// allowNull accepts a key without a value, which is the same as no key. An empty enumerated value means the default.
func allowNull(s *jsonschema.Schema) {
	if len(s.Enum) > 0 {
		s.Enum = append(slices.Clip(s.Enum), "", nil)

		return
	}

	types, _ := s.Extras["type"].([]string)
	if s.Type != "" {
		types, s.Type = []string{s.Type}, ""
	}

	s.Extras = map[string]any{"type": append(slices.Clip(types), "null")}
}
