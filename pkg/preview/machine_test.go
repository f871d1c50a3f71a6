package preview_test

import (
	"bytes"
	"net/netip"
	"reflect"
	"strings"
	"testing"

	"github.com/siderolabs/talos/pkg/machinery/nethelpers"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/preview"
	"github.com/talos-ccm/talos-ccm/pkg/version"
)

// saved returns the machine that is read from the file of m.
func saved(t testing.TB, m machine.Machine) machine.Machine {
	t.Helper()

	var file bytes.Buffer
	require.NoError(t, preview.WriteMachine(&file, m))

	read, otherVersion, err := preview.ReadMachine(file.Bytes())
	require.NoError(t, err, file.String())
	assert.Empty(t, otherVersion)

	return read
}

// fill sets v, and all that is in it, to values that are not zero.
func fill(t testing.TB, v reflect.Value) {
	t.Helper()

	for _, value := range []any{netip.MustParseAddr("10.0.0.1"), netip.MustParsePrefix("10.0.0.1/24"), nethelpers.ScopeLink} {
		if v.Type() == reflect.TypeOf(value) {
			v.Set(reflect.ValueOf(value))

			return
		}
	}

	switch v.Kind() {
	case reflect.String:
		v.SetString(`yes: "<` + v.Type().String() + ">\"\n")
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int, reflect.Uint32:
		v.Set(reflect.ValueOf(1).Convert(v.Type()))
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(t, v.Elem())
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		fill(t, v.Index(0))
		fill(t, v.Index(1))
	case reflect.Map:
		key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
		fill(t, key)
		fill(t, value)
		v.Set(reflect.MakeMap(v.Type()))
		v.SetMapIndex(key, value)
	case reflect.Struct:
		for _, field := range v.Fields() {
			fill(t, field)
		}
	default:
		t.Fatalf("no value for %s", v.Type())
	}
}

func TestReadMachine_RestoresEveryField(t *testing.T) {
	var m machine.Machine

	fill(t, reflect.ValueOf(&m).Elem())

	m.ControlPlane = nil // a file verifies nothing
	assert.Equal(t, m, saved(t, m))
}

// The zero values of Talos's types are texts that these types do not accept.
func TestReadMachine_RestoresZeroValues(t *testing.T) {
	for _, m := range []machine.Machine{
		{},
		{Addresses: make([]machine.Address, 1), NodeIPs: make([]netip.Addr, 1), ValidSubnets: make([]machine.ValidSubnet, 1), Facts: &machine.Facts{}},
	} {
		assert.Equal(t, m, saved(t, m))
	}
}

func TestReadMachine_AcceptsYAML(t *testing.T) {
	m, _, err := preview.ReadMachine([]byte("# by hand\nplatform: {platform: metal}\naddresses:\n- {prefix: 10.0.0.1/24, flags: 'permanent,nodad'}\n"))
	require.NoError(t, err)

	flags := nethelpers.AddressFlags(nethelpers.AddressPermanent | nethelpers.AddressNoDAD)
	assert.Equal(t, machine.Machine{
		Platform:  runtime.PlatformMetadataSpec{Platform: "metal"},
		Addresses: []machine.Address{{Prefix: netip.MustParsePrefix("10.0.0.1/24"), Flags: flags}},
	}, m)
}

func TestReadMachine_RejectsMistakes(t *testing.T) {
	own := "version: " + version.Version() + "\n"

	for _, test := range []struct{ name, text, want string }{
		{"empty file", "", "no documents"},
		{"output of talosctl", "node: n\nmetadata: {}\n", "line 1: field node not found"},
		{"unknown key", own + "system:\n  serialNumber: a\n", "line 3: field serialNumber not found"},
		{"unknown key without a version", "nodename: a\nhost: b\n", "line 2: field host not found"},
		{"unknown key in a list", "addresses:\n- {prefix: 10.0.0.1/24}\n- {address: 10.0.0.2/24}\n", "line 3: field address not found"},
		{"key in capitals", "Nodename: a\n", "line 1: field Nodename not found"},
		{"key that is not saved", "controlPlane: {}\n", "line 1: field controlPlane not found"},
		{"repeated key", "nodename: a\nnodename: b\n", `line 2: mapping key "nodename" already defined`},
		{"wrong type", "{\n  \"nodename\": [\"a\"]\n}", "line 2: cannot construct !!seq into string"},
		{"wrong type of another version", "version: v9.9.9\nunknown: 1\nnodename: [a]\n", "line 3: cannot construct !!seq into string"},
		{"wrong type of the version", "version: [v1]\n", "line 1: cannot construct"},
		{"invalid address", "nodename: a\nnodeIPs: [localhost]\n", `line 2: ParseAddr("localhost")`},
		{"invalid machine type", "type: king\n", `line 1: invalid machine type: "king"`},
		{"another value", "[]", "line 1: cannot construct !!seq"},
		{"open brace", "{\n", "L2.C1"},
		{"trailing data", "{}\n{}", "L2.C1"},
		{"two documents", "{}\n---\n{}", "expected single document"},
	} {
		t.Run(test.name, func(t *testing.T) {
			m, _, err := preview.ReadMachine([]byte(test.text))
			assert.ErrorContains(t, err, test.want)
			assert.Zero(t, m)
		})
	}
}

func TestReadMachine_IgnoresUnknownKeysOfOtherVersion(t *testing.T) {
	m, otherVersion, err := preview.ReadMachine([]byte(`{"version": "v9.9.9", "nodename": "a", "unknown": 1, "system": {"serialNumber": "b", "uuid": "c"}}`))
	require.NoError(t, err)
	assert.Equal(t, "v9.9.9", otherVersion)
	assert.Equal(t, "a", m.Nodename)
	assert.Equal(t, "c", m.System.UUID)
}

func FuzzReadMachine_RestoresText(f *testing.F) {
	for _, text := range []string{"", " a", "null", "1:30", "0x0c", "- {a: b}\n", "\x00\x7f\u0085\u2028\ufeff\ufffe\uffff\U0001f600", "\"\\<&>'", "\r\n\t", strings.Repeat("a", 4<<10)} {
		f.Add(text, text)
	}

	f.Fuzz(func(t *testing.T, key, value string) {
		key, value = strings.ToValidUTF8(key, ""), strings.ToValidUTF8(value, "") // as protobuf requires
		m := machine.Machine{Nodename: value, Facts: &machine.Facts{Meta: map[string]string{key: value}}}
		assert.Equal(t, m, saved(t, m))
	})
}
