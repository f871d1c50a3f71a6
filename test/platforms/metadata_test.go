//go:build e2e

package platforms_test

// platform is a platform of Talos and the instance of a machine on it.
type platform struct {
	name string
	// metadata are the responses of the metadata service, by path.
	metadata map[string]string
}

// seed is the serial number with which SMBIOS names the data source of nocloud.
const seed = "ds=nocloud-net;s=http://169.254.169.254/nocloud/"

// platforms are the platforms in values.md, in that order. It links to the providers' controller managers.
var platforms = []platform{
	{"akamai", map[string]string{
		"/v1/token":    `["token"]`,
		"/v1/instance": `{"id":123456,"label":"ak-1","region":"eu-central","type":"g6-standard-1","tags":["team:a"]}`,
		"/v1/network": `{"interfaces":[],"ipv4":{"public":["203.0.113.20/32"],"private":[],"shared":[]},
			"ipv6":{"slaac":"2001:db8:20::1/128","ranges":[],"link_local":"fe80::20/128","shared_ranges":[]}}`,
	}},
	{"alibabacloud", map[string]string{
		"/latest/api/token": "token", "/latest/meta-data/hostname": "al-1", "/latest/meta-data/instance-id": "i-bp67acfmxazb4p",
		"/latest/meta-data/instance/instance-type": "ecs.g7.large", "/latest/meta-data/region-id": "eu-central-1",
		"/latest/meta-data/zone-id": "eu-central-1a", "/latest/meta-data/eipv4": "203.0.113.21",
	}},
	{"aws", map[string]string{
		"/latest/api/token": "token", "/latest/meta-data/hostname": "ip-10-77-0-5.eu-central-1.compute.internal",
		"/latest/meta-data/local-hostname":  "ip-10-77-0-5.eu-central-1.compute.internal",
		"/latest/meta-data/public-hostname": "ec2-203-0-113-8.eu-central-1.compute.amazonaws.com",
		"/latest/meta-data/instance-id":     "i-0a1b2c3d4e5f67890", "/latest/meta-data/instance-type": "m7i.large",
		"/latest/meta-data/instance-life-cycle": "spot", "/latest/meta-data/public-ipv4": "203.0.113.8",
		"/latest/meta-data/placement/region": "eu-central-1", "/latest/meta-data/placement/availability-zone": "eu-central-1a",
		"/latest/meta-data/tags/instance": "Name\nteam", "/latest/meta-data/tags/instance/Name": "node-1",
		"/latest/meta-data/tags/instance/team": "a", "/latest/meta-data/network/interfaces/macs/": "02:29:96:8f:6a:2d/\n",
		"/latest/meta-data/network/interfaces/macs/02:29:96:8f:6a:2d/device-number": "0",
		"/latest/meta-data/network/interfaces/macs/02:29:96:8f:6a:2d/local-ipv4s":   "10.77.0.5",
	}},
	{"azure", map[string]string{
		"/metadata/instance/compute": `{"name":"az-1","zone":"1","vmSize":"Standard_D2s_v5","osProfile":{"computerName":"az-1"},
			"location":"westeurope","platformFaultDomain":"0","evictionPolicy":"",
			"resourceId":"/subscriptions/8d10/resourceGroups/RG-1/providers/Microsoft.Compute/virtualMachines/az-1"}`,
		"/metadata/instance/network/interface": `[{"ipv4":{"ipAddress":[{"privateIpAddress":"10.77.0.6","publicIpAddress":"203.0.113.12"}]}}]`,
	}},
	{"digital-ocean", map[string]string{
		"/metadata/v1.json": `{"hostname":"do-1","droplet_id":2756294,"region":"fra1","tags":["team"],"dns":{"nameservers":[]},
			"interfaces":{"public":[{"type":"public","ipv4":{"ip_address":"203.0.113.11","netmask":"255.255.255.255","gateway":""}}]}}`,
		"/metadata/v1/interfaces/public/0/ipv4/address": "203.0.113.11",
	}},
	{"exoscale", map[string]string{
		"/1.0/meta-data/local-hostname": "ex-1", "/1.0/meta-data/instance-id": "5e1d2f4e-0000-4000-8000-000000000001",
		"/1.0/meta-data/service-offering": "Medium 4096mb 2cpu", "/1.0/meta-data/availability-zone": "ch-gva-2",
		"/1.0/meta-data/public-ipv4": "203.0.113.14",
	}},
	{"gcp", map[string]string{
		"/computeMetadata/v1/project/project-id": "project-1", "/computeMetadata/v1/instance/name": "gc-1",
		"/computeMetadata/v1/instance/hostname":               "gc-1.europe-west1-b.c.project-1.internal",
		"/computeMetadata/v1/instance/id":                     "7711223344556677889",
		"/computeMetadata/v1/instance/machine-type":           "projects/123/machineTypes/e2-small",
		"/computeMetadata/v1/instance/zone":                   "projects/123/zones/europe-west1-b",
		"/computeMetadata/v1/instance/scheduling/preemptible": "TRUE", "/computeMetadata/v1/instance/tags": `["web"]`,
		"/computeMetadata/v1/instance/network-interfaces/": `[{"accessConfigs":[{"externalIp":"203.0.113.9","type":"ONE_TO_ONE_NAT"}],
			"ip":"10.77.0.9","mtu":1460}]`,
	}},
	{"hcloud", map[string]string{
		"/hetzner/v1/metadata/hostname": "hc-1", "/hetzner/v1/metadata/instance-id": "4711",
		"/hetzner/v1/metadata/availability-zone": "fsn1-dc14", "/hetzner/v1/metadata/public-ipv4": "203.0.113.7",
		"/hetzner/v1/metadata/network-config": "{version: 1, config: [{type: physical, name: eth0, subnets: " +
			"[{type: static, ipv6: true, address: '2001:db8:7::1/64'}]}]}",
	}},
	{"nocloud", map[string]string{
		"/nocloud/meta-data": "{instance-id: '100', local-hostname: nc-1, instance-type: 2VCPU-4GB, region: cluster-1, zone: pve-1," +
			" provider-id: 'proxmox://cluster-1/100'}",
		"/nocloud/network-config": "{version: 2, ethernets: {eth0: {dhcp4: false}}}", "/nocloud/user-data": "#cloud-config\n",
	}},
	{"openstack", map[string]string{
		"/openstack/latest/meta_data.json": `{"uuid":"5e1d2f4e-0000-4000-8000-000000000002","hostname":"os-1.novalocal",
			"availability_zone":"nova","project_id":"project-1"}`,
		"/openstack/latest/network_data.json": `{"links":[],"networks":[]}`,
		"/latest/meta-data/public-ipv4":       "203.0.113.10", "/latest/meta-data/instance-type": "m1.small",
	}},
	{"oracle", map[string]string{
		"/opc/v2/instance/": `{"hostname":"or-1","id":"ocid1.instance.oc1.eu-frankfurt-1.example","region":"eu-frankfurt-1",
			"canonicalRegionName":"eu-frankfurt-1","availabilityDomain":"EMIr:EU-FRANKFURT-1-AD-1","faultDomain":"FAULT-DOMAIN-3",
			"shape":"VM.Standard.E4.Flex"}`,
		"/opc/v2/vnics/": `[]`,
	}},
	{"scaleway", map[string]string{
		"/conf": `{"id":"5e1d2f4e-0000-4000-8000-000000000003","name":"sc-1","hostname":"sc-1","commercial_type":"DEV1-S",
			"location":{"zone_id":"fr-par-1"},"public_ip":{"address":"203.0.113.15","family":"inet"},"public_ips_v4":[],"tags":["team=a"]}`,
	}},
	{"upcloud", map[string]string{
		"/metadata/v1.json": `{"cloud_name":"upcloud","instance_id":"5e1d2f4e-0000-4000-8000-000000000004","hostname":"up-1",
			"region":"de-fra1","tags":["team"],"network":{"interfaces":[{"index":1,"type":"public","mac":"5e:bf:5e:02:28:07","ip_addresses":[
			{"address":"203.0.113.16","dhcp":true,"family":"IPv4","floating":false,"gateway":"203.0.113.1","network":"203.0.113.0/24"}]}],"dns":[]}}`,
	}},
	{"vultr", map[string]string{
		"/v1.json": `{"hostname":"vu-1","instance-v2-id":"5e1d2f4e-0000-4000-8000-000000000005","region":{"regioncode":"FRA"},
			"interfaces":[{"mac":"56:00:00:00:00:01","network-type":"public","ipv4":{"address":"203.0.113.13","netmask":"255.255.255.255",
			"gateway":"","routes":{}},"ipv6":{}}]}`,
		"/latest/meta-data/public-ipv4": "203.0.113.13",
	}},
}
