package nodespec_test

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/nodespec"
)

// The metadata is in the format that the driver of each platform publishes
// (siderolabs/talos internal/app/machined/pkg/runtime/v1alpha1/platform).
func TestDesired_ProviderIDAndLabelOfEveryPlatform(t *testing.T) {
	const azureVM = "/subscriptions/s/resourceGroups/rg/providers/Microsoft.Compute/virtualMachines/vm-1"

	rows := map[string]struct {
		metadata runtime.PlatformMetadataSpec
		want     string
	}{
		"akamai":        {runtime.PlatformMetadataSpec{InstanceID: "123", ProviderID: "linode://123"}, "linode://123"},
		"alibabacloud":  {runtime.PlatformMetadataSpec{InstanceID: "i-1", ProviderID: "cn-hangzhou.i-1"}, "cn-hangzhou.i-1"},
		"aws":           {runtime.PlatformMetadataSpec{InstanceID: "i-1", ProviderID: "aws:///eu-1a/i-1"}, "aws:///eu-1a/i-1"},
		"azure":         {runtime.PlatformMetadataSpec{InstanceID: azureVM, ProviderID: "azure://" + azureVM}, "azure://" + azureVM},
		"cloudstack":    {runtime.PlatformMetadataSpec{InstanceID: "u-1", ProviderID: "cloudstack://u-1"}, "cloudstack://u-1"},
		"container":     {runtime.PlatformMetadataSpec{Hostname: "c-1"}, "talos://container/" + uuid},
		"digital-ocean": {runtime.PlatformMetadataSpec{InstanceID: "456", ProviderID: "digitalocean://456"}, "digitalocean://456"},
		"equinixMetal":  {runtime.PlatformMetadataSpec{InstanceID: "e-1", ProviderID: "equinixmetal://e-1"}, "equinixmetal://e-1"},
		"exoscale":      {runtime.PlatformMetadataSpec{InstanceID: "x-1", ProviderID: "exoscale://x-1"}, "exoscale://x-1"},
		"gcp":           {runtime.PlatformMetadataSpec{InstanceID: "789", ProviderID: "gce://project/zone/vm-1"}, "gce://project/zone/vm-1"},
		"hcloud":        {runtime.PlatformMetadataSpec{InstanceID: "42", ProviderID: "hcloud://42"}, "hcloud://42"},
		"metal":         {runtime.PlatformMetadataSpec{InstanceID: uuid}, "talos://metal/" + uuid},
		"nocloud":       {runtime.PlatformMetadataSpec{InstanceID: "vm-100"}, "talos://nocloud/vm-100"},
		"opennebula":    {runtime.PlatformMetadataSpec{InstanceID: "7"}, "talos://opennebula/7"},
		"openstack":     {runtime.PlatformMetadataSpec{InstanceID: "o-1", ProviderID: "openstack:///o-1"}, "openstack:///o-1"},
		"oracle":        {runtime.PlatformMetadataSpec{InstanceID: "ocid1.x", ProviderID: "oci://ocid1.x"}, "oci://ocid1.x"},
		"scaleway":      {runtime.PlatformMetadataSpec{InstanceID: "s-1", ProviderID: "scaleway://instance/fr-par-1/s-1"}, "scaleway://instance/fr-par-1/s-1"},
		"upcloud":       {runtime.PlatformMetadataSpec{InstanceID: "00up", ProviderID: "upcloud://00up"}, "upcloud://00up"},
		"vmware":        {runtime.PlatformMetadataSpec{InstanceID: "vm-200"}, "talos://vmware/vm-200"},
		"vultr":         {runtime.PlatformMetadataSpec{InstanceID: "v-1", ProviderID: "vultr://v-1"}, "vultr://v-1"},
	}
	require.ElementsMatch(t, talosPlatforms(), slices.Collect(maps.Keys(rows)))

	for platform, row := range rows {
		t.Run(platform, func(t *testing.T) {
			in := on(row.metadata)
			in.Machine.Platform.Platform = platform
			assert.Equal(t, row.want, specOf(t, in).ProviderID)
			assert.Equal(t, platform, specOf(t, in).Labels[nodespec.LabelPlatform])

			// The upstream Talos CCM ignores the instance ID.
			in.Options.ProviderIDFromNodeIP = true
			assert.Equal(t, cmp.Or(row.metadata.ProviderID, "talos://"+platform+"/"+nodeIP), specOf(t, in).ProviderID)
		})
	}
}

// Until the metadata service responds, Talos publishes the platform name only.
func TestDesired_PendingWithoutMetadata(t *testing.T) {
	optional := []string{"metal", "container", "nocloud"}

	for _, platform := range talosPlatforms() {
		if slices.Contains(optional, platform) {
			continue
		}

		t.Run(platform, func(t *testing.T) {
			in := on(runtime.PlatformMetadataSpec{Platform: platform})
			in.Machine.PlatformPublished = false
			requirePending(t, in, platform)
		})
	}
}

func TestDesired_FallbackProviderID(t *testing.T) {
	const byUUID, byIP, wait = uuid, nodeIP, ""

	seeded := func(serial string) func(*nodespec.Input) {
		return func(in *nodespec.Input) { in.Machine.PlatformPublished, in.Machine.System.SerialNumber = false, serial }
	}
	all := func(changes ...func(*nodespec.Input)) func(*nodespec.Input) {
		return func(in *nodespec.Input) {
			for _, change := range changes {
				change(in)
			}
		}
	}
	metal := func(in *nodespec.Input) { in.Machine.Platform.InstanceID = in.Machine.System.UUID }
	unpublished := func(in *nodespec.Input) { in.Machine.PlatformPublished = false }
	shared := func(in *nodespec.Input) { in.SharedUUID = []string{"worker-2"} }
	fromIP := func(in *nodespec.Input) { in.Options.ProviderIDFromNodeIP = true }
	withUUID := func(uuid string) func(*nodespec.Input) {
		return func(in *nodespec.Input) { in.Machine.System.UUID = uuid }
	}

	for _, test := range []struct {
		name, platform string
		change         func(*nodespec.Input)
		want           string
	}{
		{"metal", "metal", metal, byUUID},
		{"metal with a shared UUID", "metal", all(metal, shared), byIP},
		{"metal without UUID", "metal", all(withUUID(""), metal), byIP},
		{"metal with the sample UUID of a vendor", "metal", all(withUUID("03000200-0400-0500-0006-000700080009"), metal), byIP},
		{"metal with fallback node-ip", "metal", all(metal, fromIP), byIP},
		{"metal with SMBIOS UUID in the metadata only", "metal", all(metal, func(in *nodespec.Input) { in.Machine.System = hardware.SystemInformationSpec{} }), wait},
		{"metal with UUID in upper case", "metal", all(withUUID(strings.ToUpper(uuid)), metal), byUUID},
		{"container without SMBIOS", "container", withUUID(""), byIP},

		{"nocloud without data source, running", "nocloud", unpublished, byUUID},
		{"nocloud without data source, fallback node-ip", "nocloud", all(unpublished, fromIP), byIP},
		{"nocloud without data source, booting", "nocloud", all(unpublished, func(in *nodespec.Input) { in.Machine.Stage = runtime.MachineStageBooting }), wait},
		{"nocloud without data source, stage unknown", "nocloud", all(unpublished, func(in *nodespec.Input) { in.Machine.Stage = runtime.MachineStageUnknown }), wait},
		{"nocloud without instance ID", "nocloud", func(*nodespec.Input) {}, byUUID},
		{"nocloud without instance ID, shared UUID", "nocloud", shared, byIP},

		{"nocloud with network seed", "nocloud", seeded("ds=nocloud-net;s=http://10.0.0.254/seed/"), wait},
		{"nocloud with network seed by TLS", "nocloud", seeded("ds=nocloud-net;h=web;s=https://10.0.0.254/"), wait},
		{"nocloud with network seed in upper case", "nocloud", seeded("ds=nocloud-net;s=HTTP://10.0.0.254/"), wait},
		{"nocloud with network seed in another order", "nocloud", seeded("s=http://10.0.0.254/;ds=nocloud-net"), wait},
		{"nocloud with network seed, published", "nocloud", all(seeded("ds=nocloud-net;s=http://10.0.0.254/"), func(in *nodespec.Input) { in.Machine.PlatformPublished = true }), byUUID},
		{"nocloud with URL and another data source: Talos reads the drive", "nocloud", seeded("ds=nocloud;s=http://10.0.0.254/"), byUUID},
		{"nocloud with URL and no data source: Talos reads the drive", "nocloud", seeded("s=http://10.0.0.254/"), byUUID},
		{"nocloud with seed of another scheme: Talos reads the drive", "nocloud", seeded("ds=nocloud-net;s=file:///seed"), byUUID},
		{"nocloud with network data source and no URL: Talos reads the drive", "nocloud", seeded("ds=nocloud-net;h=web"), byUUID},
		{"nocloud with a serial number similar to a seed", "nocloud", seeded("gpus=http"), byUUID},

		{"vmware without guestinfo", "vmware", func(*nodespec.Input) {}, byUUID},
		{"vmware without guestinfo, shared UUID", "vmware", shared, byIP},
		{"vmware, configuration not published", "vmware", unpublished, wait},
		{"vmware, configuration not published, fallback node-ip", "vmware", all(unpublished, fromIP), wait},

		{"platform not published", "", func(*nodespec.Input) {}, wait},
		{"platform of a later Talos version", "nimbus", func(*nodespec.Input) {}, wait},
	} {
		t.Run(test.name, func(t *testing.T) {
			in := on(runtime.PlatformMetadataSpec{Platform: test.platform})
			test.change(&in)

			if test.want == wait {
				requirePending(t, in, test.platform)
			} else {
				assert.Equal(t, "talos://"+test.platform+"/"+test.want, specOf(t, in).ProviderID)
			}
		})
	}
}

func TestDesired_ProviderIDOfPlatformTakesPrecedence(t *testing.T) {
	for _, test := range []struct {
		name         string
		metadata     runtime.PlatformMetadataSpec
		want, fromIP string
	}{
		{"provider ID and instance ID", runtime.PlatformMetadataSpec{Platform: "nocloud", ProviderID: "proxmox://dc/100", InstanceID: "vm-100"}, "proxmox://dc/100", "proxmox://dc/100"},
		{"instance ID and UUID", runtime.PlatformMetadataSpec{Platform: "vmware", InstanceID: "vm-200"}, "talos://vmware/vm-200", "talos://vmware/" + nodeIP},
		{"instance ID and incomplete provider ID", runtime.PlatformMetadataSpec{Platform: "nocloud", ProviderID: "proxmox://", InstanceID: "vm-100"}, "talos://nocloud/vm-100", "talos://nocloud/" + nodeIP},
		{"instance ID on a platform of a later Talos version", runtime.PlatformMetadataSpec{Platform: "nimbus", InstanceID: "n-1"}, "talos://nimbus/n-1", "talos://nimbus/" + nodeIP},
	} {
		t.Run(test.name, func(t *testing.T) {
			for fromIP, want := range map[bool]string{false: test.want, true: test.fromIP} {
				in := on(test.metadata)
				in.SharedUUID, in.Options.ProviderIDFromNodeIP = []string{"worker-2"}, fromIP
				// A published identity does not depend on the rest.
				in.Machine.PlatformPublished, in.Machine.Stage = false, runtime.MachineStageBooting
				assert.Equal(t, want, specOf(t, in).ProviderID, "fallback node-ip %v", fromIP)
			}
		})
	}
}

func TestDesired_FallbackProviderIDHasFirstNodeIP(t *testing.T) {
	for preferIPv6, want := range map[bool]string{false: "talos://metal/" + nodeIP, true: "talos://metal/2001:db8::1"} {
		in := running()
		in.Machine.Addresses = append(in.Machine.Addresses, onLink("eth0", "2001:db8::1/64"))
		in.ProvidedNodeIPs = append(in.ProvidedNodeIPs, addr("2001:db8::1"))
		in.Options = nodespec.Options{ProviderIDFromNodeIP: true, PreferIPv6: preferIPv6}

		assert.Equal(t, want, specOf(t, in).ProviderID, "preferIPv6 %v", preferIPv6)
	}
}

// A machine may get its IPv6 address before its IPv4 address.
func TestDesired_PendingUntilMachineHasNodeIPOfProviderID(t *testing.T) {
	in := running()
	in.ProvidedNodeIPs = addrs([]string{"fd00::1", nodeIP})
	in.Machine.Addresses = []machine.Address{onLink("eth0", "fd00::1/64")}
	assert.Equal(t, "talos://metal/"+uuid, specOf(t, in).ProviderID, "from the UUID")

	in.Options.ProviderIDFromNodeIP = true
	requirePending(t, in, nodeIP)

	in.Options.PreferIPv6 = true
	assert.Equal(t, "talos://metal/fd00::1", specOf(t, in).ProviderID, "IPv6 preferred")

	in.Options.PreferIPv6, in.ProviderID = false, "talos://metal/"+nodeIP
	requireAddresses(t, corev1.NodeInternalIP, in, "fd00::1")
}

// Talos 1.12 and later use metadata cached in an earlier boot until the metadata service responds; the disk may have
// been copied.
func TestDesired_PendingWithCachedMetadata(t *testing.T) {
	for _, test := range []struct {
		name, platform string
		change         func(*nodespec.Input)
		pending        bool
	}{
		{"cloud", "hcloud", func(*nodespec.Input) {}, true},
		{"vmware", "vmware", func(*nodespec.Input) {}, true},
		{"nocloud, booting", "nocloud", func(in *nodespec.Input) { in.Machine.Stage = runtime.MachineStageBooting }, true},
		{"nocloud, network seed", "nocloud", func(in *nodespec.Input) { in.Machine.System.SerialNumber = "ds=nocloud-net;s=http://10.0.0.254/" }, true},
		{"nocloud, running without network seed", "nocloud", func(*nodespec.Input) {}, false},
		{"metal", "metal", func(*nodespec.Input) {}, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			in := on(runtime.PlatformMetadataSpec{Platform: test.platform, InstanceID: "another", ProviderID: test.platform + "://another"})
			in.Machine.PlatformFromCache = true
			test.change(&in)

			if test.pending {
				requirePending(t, in, "earlier")
			} else {
				desired(t, in)
			}
		})
	}
}

func TestDesired_PendingWithInvalidIdentity(t *testing.T) {
	const invalid = "invalid instance ID or providerID"

	for _, test := range []struct{ name, platform, instanceID, providerID, mention string }{
		{"space", "nocloud", "my machine", "", invalid},
		{"line break", "hcloud", "1", "hcloud://1\n", invalid},
		{"NUL", "hcloud", "1\x00", "", invalid},
		{"invalid UTF-8", "nocloud", "\xff", "", invalid},
		{"instance ID too long", "nocloud", strings.Repeat("a", 64<<10), "", invalid},
		{"provider ID too long", "hcloud", "1", "hcloud://" + strings.Repeat("1", 64<<10), invalid},
		{"invisible character", "nocloud", "a\u200b", "", invalid},

		// Drivers publish an incomplete providerID if they cannot read the instance ID: openstack if neither drive nor
		// service has metadata; aws, cloudstack and exoscale if the service lacks the key.
		{"incomplete, openstack", "openstack", "", "openstack:///", "openstack"},
		{"incomplete, aws with zone", "aws", "", "aws:///eu-1a/", "aws"},
		{"incomplete, aws", "aws", "", "aws:////", "aws"},
		{"incomplete, cloudstack", "cloudstack", "", "cloudstack://", "cloudstack"},
		{"incomplete, exoscale", "exoscale", "", "exoscale://", "exoscale"},
		{"incomplete, hcloud", "hcloud", "", "hcloud://", "hcloud"},
		{"incomplete, scaleway", "scaleway", "", "scaleway://instance/fr-par-1/", "scaleway"},
	} {
		t.Run(test.name, func(t *testing.T) {
			requirePending(t, on(runtime.PlatformMetadataSpec{Platform: test.platform, InstanceID: test.instanceID, ProviderID: test.providerID}), test.mention)
		})
	}
}
