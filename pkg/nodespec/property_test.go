package nodespec_test

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/siderolabs/talos/pkg/machinery/nethelpers"
	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
)

// randomInput returns a random machine, preferably an almost valid one. It depends only on the seed.
func randomInput(seed uint64) nodespec.Input {
	r := rand.New(rand.NewPCG(seed, 0))
	in := nodespec.Input{
		Machine: machine.Machine{
			Nodename:          "worker-1",
			ClusterName:       randomText(r),
			Stage:             runtime.MachineStage(r.IntN(10)),
			PlatformPublished: chance(r),
			System: hardware.SystemInformationSpec{
				UUID:         oneOf(r, "", uuid, "00000000-0000-0000-0000-000000000000", randomText(r)),
				SerialNumber: oneOf(r, "", "ds=nocloud-net;s=http://x/", randomText(r)),
			},
			Platform: runtime.PlatformMetadataSpec{
				Platform: oneOf(r, append(talosPlatforms(), "", randomText(r))...), Hostname: randomText(r), Region: randomText(r), Zone: randomText(r), InstanceType: randomText(r),
				InstanceID: randomText(r), ProviderID: randomText(r), Spot: chance(r), InternalDNS: randomText(r), ExternalDNS: randomText(r),
			},
		},
		Options: nodespec.Options{ClusterName: randomText(r), PreferIPv6: chance(r), ProviderIDFromNodeIP: chance(r)},
	}

	if chance(r) {
		in.SharedUUID = []string{"worker-2"}
	}

	for range r.IntN(8) {
		in.Machine.Addresses = append(in.Machine.Addresses, randomAddress(r))
	}

	for range r.IntN(4) {
		in.ProvidedNodeIPs = append(in.ProvidedNodeIPs, randomIP(r))
		in.Machine.NodeIPs = append(in.Machine.NodeIPs, randomIP(r))
		in.Machine.ExcludedSubnets = append(in.Machine.ExcludedSubnets, randomAddress(r).Prefix.Masked())
	}

	return in
}

func chance(r *rand.Rand) bool { return r.IntN(2) == 0 }

func oneOf(r *rand.Rand, list ...string) string { return list[r.IntN(len(list))] }

func randomText(r *rand.Rand) string {
	return oneOf(r, "", "", "a", "eu-1a", "i-1", "aws:///eu-1a/i-1", "openstack:///", "Worker_1.Example.Org.", "a.b.", "A.b.c.", "a.b.svc", "a.b.1", ".", "...", "10.0.0.1", "*.x",
		"with blank", "ünïcode", "\xff\x00", strings.Repeat("x", 64), strings.Repeat("y.", 200), fmt.Sprint(r.Uint64()))
}

func randomIP(r *rand.Rand) netip.Addr {
	last := 1 + r.IntN(3)
	network := oneOf(r, "10.0.0.%d", "203.0.113.%d", "::ffff:203.0.113.%d", "100.64.0.%d", "127.0.0.%d", "224.0.0.%d", "2001:db8::%d", "fd00::%d", "fe80::%d", "::%d", "64:ff9b::%d")

	return addr(fmt.Sprintf(network, last))
}

func randomAddress(r *rand.Rand) machine.Address {
	ip := randomIP(r)

	return machine.Address{
		Prefix: netip.PrefixFrom(ip, r.IntN(ip.BitLen()+1)),
		Link:   oneOf(r, "", "lo", "eth0", "eth0", "eth1", "external", "kube-ipvs0", "flannel.1", "kubespan", randomText(r)),
		Scope:  []nethelpers.Scope{nethelpers.ScopeGlobal, nethelpers.ScopeGlobal, nethelpers.ScopeLink, nethelpers.ScopeHost}[r.IntN(4)],
		Flags:  nethelpers.AddressFlags(r.IntN(1 << 12)),
	}
}

func FuzzDesired_Machines(f *testing.F) {
	for seed := range uint64(1000) {
		f.Add(seed)
	}

	f.Fuzz(func(t *testing.T, seed uint64) {
		in := randomInput(seed)
		spec, problems, pending := nodespec.Desired(in)
		assert.Equal(t, randomInput(seed), in, "Desired changed its input")

		again, problemsAgain, pendingAgain := nodespec.Desired(in)
		assert.Equal(t, again, spec)
		assert.Equal(t, problemsAgain, problems)
		assert.Equal(t, pendingAgain, pending)
		check(t, in)
	})
}

// FuzzDesired_Metadata uses arbitrary strings as metadata.
func FuzzDesired_Metadata(f *testing.F) {
	f.Add("nocloud", "i-1", "", "rack 7", "A.B.", "", "ds=nocloud-net;s=http://x/", uuid)
	f.Add("openstack", "", "openstack:///", "", "", "\xff", "", "")

	f.Fuzz(func(t *testing.T, platform, instanceID, providerID, zone, internalDNS, externalDNS, serial, smbiosUUID string) {
		in := running()
		in.Machine.Platform = runtime.PlatformMetadataSpec{
			Platform: platform, InstanceID: instanceID, ProviderID: providerID, Zone: zone, InternalDNS: internalDNS, ExternalDNS: externalDNS,
		}
		in.Machine.System = hardware.SystemInformationSpec{SerialNumber: serial, UUID: smbiosUUID}

		check(t, in)
	})
}

// check fails the test if the desired state is neither valid nor pending.
func check(t *testing.T, in nodespec.Input) {
	t.Helper()

	spec, problems, pending := nodespec.Desired(in)
	if pending != "" {
		assert.Equal(t, nodespec.Spec{}, spec)
		assert.Nil(t, problems)

		return
	}

	checkLabels(t, spec, problems)
	checkAddresses(t, in, spec)
	checkProviderID(t, in, spec)
}

func checkLabels(t *testing.T, spec nodespec.Spec, problems []nodespec.Problem) {
	t.Helper()

	for key, value := range spec.Labels {
		assert.Empty(t, validation.IsQualifiedName(key))
		assert.Empty(t, validation.IsValidLabelValue(value))
		assert.NotEmpty(t, value)
	}

	for _, p := range problems {
		assert.NotContains(t, spec.Labels, p.Key)
		assert.NotEmpty(t, p.Value)
		assert.NotEmpty(t, p.Why)
	}
}

func checkAddresses(t *testing.T, in nodespec.Input, spec nodespec.Spec) {
	t.Helper()

	order := []corev1.NodeAddressType{corev1.NodeInternalIP, corev1.NodeExternalIP, corev1.NodeHostName, corev1.NodeInternalDNS, corev1.NodeExternalDNS}

	for i, a := range spec.Addresses {
		assert.NotContains(t, spec.Addresses[:i], a)

		if i > 0 && slices.Index(order, a.Type) < slices.Index(order, spec.Addresses[i-1].Type) {
			t.Errorf("%v comes after %v", a, spec.Addresses[i-1])
		}
	}

	for _, typ := range order[2:] {
		for _, name := range of(typ, spec) {
			if why := validation.IsDNS1123Subdomain(name); len(why) > 0 || (name != in.Machine.Nodename && strings.Count(name, ".") < 2) {
				t.Errorf("%s %q: %v", typ, name, why)
			}
		}
	}

	internal, external := of(corev1.NodeInternalIP, spec), of(corev1.NodeExternalIP, spec)
	assert.NotEmpty(t, internal)
	assert.LessOrEqual(t, len(internal), 2)

	checkIPs(t, in.Machine, append(internal, external...))
}

// checkIPs fails unless the list contains addresses of the machine only, in canonical form and without duplicates.
func checkIPs(t *testing.T, m machine.Machine, list []string) {
	t.Helper()

	for i, text := range list {
		ip, err := netip.ParseAddr(text)
		if err != nil || ip.Is4In6() || ip.Zone() != "" || ip.String() != text {
			t.Errorf("%q is not a canonical address: %v", text, err)
		}

		assert.True(t, m.HasAddress(ip))
		assert.NotContains(t, list[:i], text)
	}
}

func checkProviderID(t *testing.T, in nodespec.Input, spec nodespec.Spec) {
	t.Helper()

	meta := in.Machine.Platform
	if spec.ProviderID == meta.ProviderID && !strings.HasSuffix(meta.ProviderID, "/") {
		return
	}

	id, ours := strings.CutPrefix(spec.ProviderID, "talos://"+meta.Platform+"/")
	assert.True(t, ours && id != "", "providerID %q does not identify an instance of %q", spec.ProviderID, meta.Platform)
}
